// Token by token generation is the forward pass, with memory that does not grow.
#include "generate/generator.h"

#include <cmath>

#include <gtest/gtest.h>

#include "model/head.h"
#include "plan/cache_memory.h"
#include "support/compare.h"
#include "support/tiny_model.h"

namespace bifocal::test {

namespace {

constexpr std::int64_t kVocabulary = 53;

std::vector<ModelConfig> all_models() {
  std::vector<ModelConfig> models;
  for (const Family family : {Family::qwen3, Family::qwen2, Family::llama}) {
    const ModelConfig teacher = tiny_teacher(family);
    models.push_back(teacher);
    for (const NamedMixers& student : tiny_students(teacher)) {
      models.push_back(tiny_student(teacher, student.mixers));
    }
  }
  return models;
}

std::vector<std::int32_t> random_ids(std::int64_t count, std::uint64_t seed) {
  return packed_row({count}, kVocabulary, seed).ids;
}

// A model with what a test asks of it.
class Speaker {
 public:
  explicit Speaker(const ModelConfig& config, DType dtype = DType::f64)
      : device_(dtype), model_(device_.context(), config, *self_) {}

  Context context() { return device_.context(); }

  Generator generator(std::int64_t batch, std::int64_t capacity = 128) {
    return {context(), model_.decoder(), batch, capacity};
  }

  // Logits [tokens, vocabulary] of a sequence by the forward pass.
  Tensor forward(const std::vector<std::int32_t>& ids) {
    Row row = packed_row({static_cast<std::int64_t>(ids.size())}, kVocabulary, 1);
    row.ids = ids;
    RowShard shard = make_row_shard(context(), row, *self_);
    const Tensor hidden = model_.decoder().forward(shard.layout, shard.ids);
    Tensor logits =
        context().memory.empty(Region::loss, context().dtype, {row.tokens(), kVocabulary});
    Head(context(), model_.config(), model_.weights()).logits(hidden, logits);
    return logits;
  }

 private:
  Device device_;
  std::unique_ptr<Communicator> self_ = make_self_communicator();
  TinyModel model_;
};

// Every position's logits, which reach far past each window with its pinned tokens (at most 23
// here): sums of some dozen terms in another order, 1e-11 in double; in float32 the specification's
// bound for outputs.
TEST(Generator, TokenByTokenIsTheForwardPass) {
  for (const ModelConfig& config : all_models()) {
    SCOPED_TRACE(fmt::format("{}: {}; {}; {}",
                             name_of(config.family),
                             describe(config.mixers[0]),
                             describe(config.mixers[1]),
                             describe(config.mixers[2])));
    for (const DType dtype : {DType::f64, DType::f32}) {
      Speaker speaker(config, dtype);
      const std::vector<std::int32_t> ids = random_ids(90, 3);
      const Tensor want = speaker.forward(ids);
      Generator generator = speaker.generator(1);
      for (std::int64_t token = 0; token < 90; ++token) {
        generator.feed({ids[static_cast<std::size_t>(token)]}, {1});
        ASSERT_TRUE(is_close(
            generator.logits(), want.rows(token, token + 1), dtype == DType::f64 ? 1e-11 : 1e-5))
            << "token " << token;
      }
    }
  }
}

TEST(Generator, SequencesOfABatchAreAsIfAlone) {
  const std::vector<std::int64_t> lengths = {40, 1, 23, 40, 7};
  for (const ModelConfig& config : all_models()) {
    Speaker speaker(config);
    std::vector<std::vector<std::int32_t>> sequences;
    for (std::size_t b = 0; b < lengths.size(); ++b) {
      sequences.push_back(random_ids(lengths[b], 10 + b));
    }
    Generator generator = speaker.generator(5);
    for (std::size_t step = 0; step < 40; ++step) {
      std::vector<std::int32_t> ids(5, 0);
      std::vector<std::uint8_t> active(5, 0);
      for (std::size_t b = 0; b < 5; ++b) {
        active[b] = step < sequences[b].size() ? 1 : 0;
        if (active[b] != 0) {
          ids[b] = sequences[b][step];
        }
      }
      generator.feed(ids, active);
      for (std::size_t b = 0; b < 5; ++b) {
        if (step + 1 != sequences[b].size()) {
          continue;
        }
        const auto row = static_cast<std::int64_t>(b);
        const auto last = static_cast<std::int64_t>(step);
        // Matrix products of five rows and of one sum alike but for rounding.
        EXPECT_CLOSE(generator.logits().rows(row, row + 1),
                     speaker.forward(sequences[b]).rows(last, last + 1),
                     1e-11);
      }
    }
  }
}

TEST(Generator, ASequenceThatPausesGoesOnWhereItWas) {
  for (const ModelConfig& config : all_models()) {
    Speaker speaker(config);
    const std::vector<std::int32_t> ids = random_ids(30, 4);
    Generator generator = speaker.generator(2);
    for (std::size_t token = 0; token < 30; ++token) {
      generator.feed({11, 12}, {1, 0});  // the neighbour speaks twice as often
      generator.feed({13, ids[token]}, {1, 1});
    }
    EXPECT_CLOSE(generator.logits().rows(1, 2), speaker.forward(ids).rows(29, 30), 1e-11);
  }
}

TEST(Generator, ResetForgetsEverything) {
  for (const ModelConfig& config : all_models()) {
    Speaker speaker(config, DType::f32);
    const auto speak = [](Generator& generator) {
      for (const std::int32_t id : random_ids(30, 5)) {
        generator.feed({id}, {1});
      }
      return to_doubles(generator.logits());
    };
    Generator generator = speaker.generator(1);
    const std::vector<double> first = speak(generator);
    generator.reset();
    EXPECT_EQ(speak(generator), first);
  }
}

TEST(Generator, MemoryOfABoundedModelDoesNotGrow) {
  const ModelConfig teacher = tiny_teacher();
  for (const NamedMixers& student : tiny_students(teacher)) {
    const bool has_full = student.mixers[0].is_full() || student.mixers[1].is_full();
    const ModelConfig config = tiny_student(teacher, student.mixers);
    Speaker speaker(config, DType::f32);
    EXPECT_EQ(speaker.generator(2, 1000).cache_bytes() == speaker.generator(2, 50).cache_bytes(),
              !has_full);
    EXPECT_EQ(speaker.generator(4).cache_bytes(), 2 * speaker.generator(2).cache_bytes());
    Generator generator = speaker.generator(2);
    generator.feed({1, 2}, {1, 1});
    const std::size_t cache = generator.cache_bytes();
    const std::size_t held = speaker.context().memory.current_bytes(Region::cache);
    for (int token = 0; token < 100; ++token) {
      generator.feed({3, 4}, {1, 1});
    }
    EXPECT_EQ(generator.cache_bytes(), cache);
    EXPECT_EQ(speaker.context().memory.current_bytes(Region::cache), held);
  }
}

// In float32 keys and values take twice the bf16 bytes of `memory`, and n and m are not counted
// there.
TEST(Generator, CacheIsWhatTheMemoryCommandSays) {
  const ModelConfig teacher = tiny_teacher();
  for (const NamedMixers& student : tiny_students(teacher)) {
    const ModelConfig config = tiny_student(teacher, student.mixers);
    double want = 0.0;
    for (const MixerSettings& mixer : config.mixers) {
      const auto states = static_cast<double>(mixer.num_states(config.heads, config.kv_heads));
      const auto dim = static_cast<double>(config.head_dim);
      const double state_bytes = states * dim * dim * 4.0;
      want += 2.0 * (layer_cache_bytes(mixer, config, 64) - state_bytes) + state_bytes +
              states * (dim + 1.0) * 4.0;
    }
    Speaker speaker(config, DType::f32);
    EXPECT_EQ(static_cast<double>(speaker.generator(1, 64).cache_bytes()), want) << student.name;
  }
}

std::vector<GeneratedAnswer> speak(Speaker& speaker,
                                   std::int64_t batch,
                                   const std::vector<std::vector<std::int32_t>>& prompts,
                                   std::int64_t first_stream,
                                   const GenerateOptions& options) {
  Generator generator = speaker.generator(batch);
  return generate(speaker.context(), generator, prompts, first_stream, options);
}

std::size_t argmax_of_row(const ConstTensorView& logits, std::int64_t row) {
  const std::vector<double> values = to_doubles(logits.rows(row, row + 1));
  return static_cast<std::size_t>(std::max_element(values.begin(), values.end()) - values.begin());
}

TEST(Generate, GreedyTakesTheLargestLogitOfTheForwardPass) {
  for (const ModelConfig& config : all_models()) {
    Speaker speaker(config);
    const std::vector<std::int32_t> prompt = random_ids(35, 6);
    const std::vector<GeneratedAnswer> answers =
        speak(speaker, 1, {prompt}, 0, {.max_new_tokens = 20});
    ASSERT_EQ(answers[0].ids.size(), 20U);
    EXPECT_FALSE(answers[0].stopped);
    std::vector<std::int32_t> all = prompt;
    all.insert(all.end(), answers[0].ids.begin(), answers[0].ids.end());
    const Tensor logits = speaker.forward(all);
    for (std::int64_t i = 0; i < 20; ++i) {
      EXPECT_EQ(static_cast<std::size_t>(answers[0].ids[static_cast<std::size_t>(i)]),
                argmax_of_row(logits, 34 + i));
    }
  }
}

TEST(Generate, AnswersDoNotDependOnBatchMatesNorOnTheBatch) {
  for (const ModelConfig& config : all_models()) {
    Speaker speaker(config);
    const std::vector<std::vector<std::int32_t>> prompts = {
        random_ids(30, 7), random_ids(1, 8), random_ids(12, 9)};
    for (const double temperature : {0.0, 1.0}) {
      const GenerateOptions options{
          .max_new_tokens = 15, .temperature = temperature, .top_k = 20, .top_p = 0.95, .seed = 3};
      const auto together = speak(speaker, 3, prompts, 100, options);
      const auto with_room = speak(speaker, 6, prompts, 100, options);
      for (std::size_t i = 0; i < prompts.size(); ++i) {
        const auto alone =
            speak(speaker, 1, {prompts[i]}, 100 + static_cast<std::int64_t>(i), options);
        EXPECT_EQ(together[i].ids, alone[0].ids);
        EXPECT_EQ(with_room[i].ids, alone[0].ids);
      }
    }
  }
}

TEST(Generate, SamplesFollowSeedAndStream) {
  Speaker speaker(tiny_teacher());
  const std::vector<std::vector<std::int32_t>> prompts = {{5, 6}, {5, 6}};
  const GenerateOptions options{.max_new_tokens = 30, .temperature = 1.0, .seed = 3};
  const auto first = speak(speaker, 2, prompts, 0, options);
  EXPECT_NE(first[0].ids, first[1].ids);
  EXPECT_EQ(speak(speaker, 2, prompts, 0, options)[1].ids, first[1].ids);
  GenerateOptions other = options;
  other.seed = 4;
  EXPECT_NE(speak(speaker, 2, prompts, 0, other)[0].ids, first[0].ids);
}

TEST(Generate, StopsAtAStopTokenWhichItKeeps) {
  Speaker speaker(tiny_teacher());
  const std::vector<std::int32_t> prompt = random_ids(4, 12);
  const auto free = speak(speaker, 1, {prompt}, 0, {.max_new_tokens = 12, .temperature = 1.0});
  const std::int32_t stop = free[0].ids[5];
  const auto first = std::find(free[0].ids.begin(), free[0].ids.end(), stop);
  const auto stopped = speak(
      speaker, 1, {prompt}, 0, {.max_new_tokens = 12, .temperature = 1.0, .stop_ids = {stop}});
  EXPECT_TRUE(stopped[0].stopped);
  EXPECT_EQ(stopped[0].ids, std::vector<std::int32_t>(free[0].ids.begin(), first + 1));
}

TEST(Generate, TakesNoNewTokensAndNoPrompts) {
  Speaker speaker(tiny_teacher());
  EXPECT_TRUE(speak(speaker, 2, {{1, 2, 3}}, 0, {.max_new_tokens = 0})[0].ids.empty());
  EXPECT_TRUE(speak(speaker, 2, {}, 0, {.max_new_tokens = 4}).empty());
}

TEST(Generate, RefusesEmptyPromptsAndTooMany) {
  Speaker speaker(tiny_teacher());
  EXPECT_THROW(speak(speaker, 1, {{}}, 0, {}), Error);
  EXPECT_THROW(speak(speaker, 1, {{1}, {2}}, 0, {}), Error);
}

}  // namespace

}  // namespace bifocal::test
