// Prompts in chunks and answers token by token are the forward pass, with memory that does not
// grow.
#include "generate/generator.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <gtest/gtest.h>

#include "core/process.h"
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

std::string describe_all(const ModelConfig& config) {
  return fmt::format("{}: {}; {}; {}",
                     name_of(config.family),
                     describe(config.mixers[0]),
                     describe(config.mixers[1]),
                     describe(config.mixers[2]));
}

// A model with what a test asks of it.
class Speaker {
 public:
  explicit Speaker(const ModelConfig& config, DType dtype = DType::f64)
      : device_(dtype), model_(device_.context(), config, *self_) {}

  Context context() { return device_.context(); }

  TinyModel& model() { return model_; }

  Generator generator(std::int64_t batch) { return {context(), model_.decoder(), batch}; }

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

ConstTensorView feed_one(Generator& generator, std::int64_t slot, std::int32_t id) {
  return generator.feed(std::span(&slot, 1), std::span(&id, 1));
}

// Every position's logits, which reach far past each window with its pinned tokens (at most 23
// here): sums of some dozen terms in another order, 1e-11 in double; in float32 the specification's
// bound for outputs.
double bound_of(DType dtype) {
  return dtype == DType::f64 ? 1e-11 : 1e-5;
}

TEST(Generator, TokenByTokenIsTheForwardPass) {
  for (const ModelConfig& config : all_models()) {
    SCOPED_TRACE(describe_all(config));
    for (const DType dtype : {DType::f64, DType::f32}) {
      Speaker speaker(config, dtype);
      const std::vector<std::int32_t> ids = random_ids(90, 3);
      const Tensor want = speaker.forward(ids);
      Generator generator = speaker.generator(1);
      for (std::int64_t token = 0; token < 90; ++token) {
        ASSERT_TRUE(is_close(feed_one(generator, 0, ids[static_cast<std::size_t>(token)]),
                             want.rows(token, token + 1),
                             bound_of(dtype)))
            << "token " << token;
      }
    }
  }
}

// Chunks of one token, of two, shorter and longer than every window, of which the last is cut, and
// one for the whole prompt; then tokens one by one, which read what the chunks left behind.
TEST(Generator, ChunksOfAnySizeAreTheForwardPass) {
  constexpr std::int64_t kPrompt = 150;
  constexpr std::int64_t kTokens = 200;
  for (const ModelConfig& config : all_models()) {
    SCOPED_TRACE(describe_all(config));
    for (const DType dtype : {DType::f64, DType::f32}) {
      Speaker speaker(config, dtype);
      const std::vector<std::int32_t> ids = random_ids(kTokens, 3);
      const Tensor want = speaker.forward(ids);
      Generator generator = speaker.generator(2);
      for (const std::int64_t chunk : {1, 2, 7, 64, 400}) {
        SCOPED_TRACE(chunk);
        generator.reset(1);
        const std::span<const std::int32_t> prompt = std::span(ids).first(kPrompt);
        EXPECT_CLOSE(
            generator.prefill(1, prompt, chunk), want.rows(kPrompt - 1, kPrompt), bound_of(dtype));
        EXPECT_EQ(generator.tokens(1), kPrompt);
        for (std::int64_t token = kPrompt; token < kTokens; ++token) {
          ASSERT_TRUE(is_close(feed_one(generator, 1, ids[static_cast<std::size_t>(token)]),
                               want.rows(token, token + 1),
                               bound_of(dtype)))
              << "token " << token;
        }
      }
    }
  }
}

// A conversation: prompts that follow what was said, cut anywhere.
TEST(Generator, ChunksFollowTokensAndTokensFollowChunks) {
  for (const ModelConfig& config : all_models()) {
    SCOPED_TRACE(describe_all(config));
    Speaker speaker(config);
    const std::vector<std::int32_t> ids = random_ids(120, 5);
    const Tensor want = speaker.forward(ids);
    Generator generator = speaker.generator(1);
    std::size_t token = 0;
    for (const std::size_t length : {3, 1, 20, 2, 40, 1, 1, 30, 22}) {
      const std::span<const std::int32_t> next = std::span(ids).subspan(token, length);
      token += length;
      const ConstTensorView logits =
          length == 1 ? feed_one(generator, 0, next[0]) : generator.prefill(0, next, 16);
      const auto last = static_cast<std::int64_t>(token);
      EXPECT_CLOSE(logits, want.rows(last - 1, last), 1e-11) << "after " << token;
    }
    ASSERT_EQ(token, ids.size());
  }
}

// Each sequence has its own length, and the batch gets smaller from step to step; not one bit of a
// sequence knows of the others.
TEST(Generator, SequencesOfABatchHaveTheBitsOfThoseAlone) {
  const std::vector<std::int64_t> lengths = {40, 1, 23, 40, 7};
  for (const ModelConfig& config : all_models()) {
    Speaker speaker(config, DType::f32);
    std::vector<std::vector<std::int32_t>> sequences;
    std::vector<std::vector<double>> alone;
    for (std::size_t b = 0; b < lengths.size(); ++b) {
      sequences.push_back(random_ids(lengths[b], 10 + b));
      Generator one = speaker.generator(1);
      for (const std::int32_t id : sequences[b]) {
        feed_one(one, 0, id);
      }
      alone.push_back(to_doubles(feed_one(one, 0, 9)));
    }
    Generator generator = speaker.generator(5);
    for (std::size_t step = 0; step <= 40; ++step) {
      std::vector<std::int64_t> slots;
      std::vector<std::int32_t> ids;
      for (std::size_t b = 5; b-- > 0;) {
        if (step <= sequences[b].size()) {
          slots.push_back(static_cast<std::int64_t>(b));
          ids.push_back(step < sequences[b].size() ? sequences[b][step] : 9);
        }
      }
      const ConstTensorView logits = generator.feed(slots, ids);
      for (std::size_t i = 0; i < slots.size(); ++i) {
        const auto b = static_cast<std::size_t>(slots[i]);
        const auto row = static_cast<std::int64_t>(i);
        if (step == sequences[b].size()) {
          EXPECT_EQ(to_doubles(logits.rows(row, row + 1)), alone[b]);
        }
      }
    }
  }
}

TEST(Generator, ResetForgetsOneSequenceAndNoOther) {
  for (const ModelConfig& config : all_models()) {
    Speaker speaker(config, DType::f32);
    const std::vector<std::int32_t> ids = random_ids(30, 5);
    Generator generator = speaker.generator(2);
    const std::vector<double> first = to_doubles(generator.prefill(0, ids));
    generator.prefill(1, std::span(ids).first(20));
    generator.reset(0);
    EXPECT_EQ(generator.tokens(0), 0);
    EXPECT_EQ(to_doubles(generator.prefill(0, ids)), first);
    EXPECT_EQ(generator.tokens(1), 20);
    Generator other = speaker.generator(1);
    other.prefill(0, std::span(ids).first(20));
    EXPECT_EQ(to_doubles(feed_one(generator, 1, 3)), to_doubles(feed_one(other, 0, 3)));
  }
}

TEST(Generator, RefusesMeaninglessCalls) {
  Speaker speaker(tiny_teacher());
  EXPECT_THROW(speaker.generator(0), Error);
  Generator generator = speaker.generator(1);
  EXPECT_THROW(generator.prefill(0, {}), Error);
  EXPECT_THROW(generator.prefill(0, random_ids(3, 1), 0), Error);
  const std::vector<std::int32_t> outside = {1, 53};
  EXPECT_THROW(generator.prefill(0, outside), Error);
  EXPECT_THROW(feed_one(generator, 0, -1), Error);
}

// bf16 weights are read as they are stored: the model whose float32 weights hold the same numbers.
// 16 tokens and more take BLAS, fewer the decoding products.
TEST(Generator, Bfloat16WeightsAreReadAsStored) {
  const std::unique_ptr<Communicator> self = make_self_communicator();
  const ModelConfig teacher = tiny_teacher();
  std::vector<ModelConfig> models = {teacher};
  for (const NamedMixers& student : tiny_students(teacher)) {
    models.push_back(tiny_student(teacher, student.mixers));
  }
  for (const ModelConfig& config : models) {
    SCOPED_TRACE(describe_all(config));
    Speaker speaker(config, DType::f32);
    const ParameterTable table(config);
    Weights narrow(speaker.context(),
                   table,
                   *self,
                   {Weights::Placement::sharded, DType::bf16, Region::weights});
    const NamedValues values = whole_weights(speaker.model().weights());
    narrow.fill([&](const Parameter& parameter, std::int64_t first, const TensorView& piece) {
      for (std::int64_t i = 0; i < piece.size(); ++i) {
        piece.as<BFloat16>()[i] = to_bfloat16(
            static_cast<float>(values.at(parameter.name)[static_cast<std::size_t>(first + i)]));
      }
    });
    for (const Parameter& parameter : table.parameters()) {
      speaker.model().change(parameter.name, [](double old, std::int64_t) {
        return static_cast<double>(to_float(to_bfloat16(static_cast<float>(old))));
      });
    }
    Decoder decoder(speaker.context(), config, narrow);
    Generator got(speaker.context(), decoder, 1);
    Generator want = speaker.generator(1);
    for (const std::int64_t length : {20, 1, 7}) {
      const std::vector<std::int32_t> ids = random_ids(length, 8);
      const std::vector<double> logits = to_doubles(want.prefill(0, ids));
      EXPECT_EQ(to_doubles(got.prefill(0, ids)), logits);
    }
  }
}

TEST(Generator, CacheOfABoundedModelDoesNotGrow) {
  const ModelConfig teacher = tiny_teacher();
  for (const NamedMixers& student : tiny_students(teacher)) {
    const bool has_full = student.mixers[0].is_full() || student.mixers[1].is_full();
    Speaker speaker(tiny_student(teacher, student.mixers), DType::f32);
    EXPECT_EQ(speaker.generator(4).cache_bytes(), 2 * speaker.generator(2).cache_bytes());
    Generator generator = speaker.generator(2);
    feed_one(generator, 0, 1);
    const std::size_t cache = generator.cache_bytes();
    for (int token = 0; token < 300; ++token) {
      feed_one(generator, 0, 3);
    }
    EXPECT_EQ(generator.cache_bytes() == cache, !has_full) << student.name;
    EXPECT_GE(speaker.context().memory.current_bytes(Region::cache), generator.cache_bytes());
  }
}

// A teacher's cache takes what its sequences need, a quarter and 256 tokens more at most, and gives
// it back.
TEST(Generator, AFullCacheGrowsWithItsSequenceAlone) {
  const ModelConfig config = tiny_teacher();
  Speaker speaker(config, DType::f32);
  Generator generator = speaker.generator(3);
  EXPECT_EQ(generator.cache_bytes(), 0U);
  const auto token_bytes =
      static_cast<std::size_t>(config.layers * 2 * config.kv_width()) * sizeof(float);
  std::size_t steps = 0;
  std::size_t last = 0;
  for (std::size_t tokens = 1; tokens <= 3000; ++tokens) {
    feed_one(generator, 1, 5);
    EXPECT_GE(generator.cache_bytes(), tokens * token_bytes);
    EXPECT_LE(generator.cache_bytes(), (tokens + tokens / 4 + 256) * token_bytes);
    steps += generator.cache_bytes() != last ? 1 : 0;
    last = generator.cache_bytes();
  }
  EXPECT_LE(steps, 10U);
  generator.reset(1);
  EXPECT_EQ(generator.cache_bytes(), 0U);
}

TEST(Generator, AMemoryLimitNamesTheCache) {
  Device device(DType::f32);
  const std::unique_ptr<Communicator> self = make_self_communicator();
  TinyModel model(device.context(), tiny_teacher(), *self);
  Memory small(std::size_t{1} << 20);
  Stream& stream = device.context().stream;
  Generator generator(Context{stream, small, DType::f32}, model.decoder(), 1);
  try {
    for (int token = 0; token < 100000; ++token) {
      feed_one(generator, 0, 5);
    }
    FAIL() << "no limit";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("more for cache"), std::string::npos) << error.what();
  }
}

// In float32 keys and values take twice the bf16 bytes of `memory`, and n and m are not counted
// there. A full layer has room for 256 tokens after the first.
TEST(Generator, CacheIsWhatTheMemoryCommandSays) {
  const ModelConfig teacher = tiny_teacher();
  for (const NamedMixers& student : tiny_students(teacher)) {
    const ModelConfig config = tiny_student(teacher, student.mixers);
    double want = 0.0;
    for (const MixerSettings& mixer : config.mixers) {
      const auto states = static_cast<double>(mixer.num_states(config.heads, config.kv_heads));
      const auto dim = static_cast<double>(config.head_dim);
      const double state_bytes = states * dim * dim * 4.0;
      want += 2.0 * (layer_cache_bytes(mixer, config, 256) - state_bytes) + state_bytes +
              states * (dim + 1.0) * 4.0;
    }
    Speaker speaker(config, DType::f32);
    Generator generator = speaker.generator(1);
    feed_one(generator, 0, 1);
    EXPECT_EQ(static_cast<double>(generator.cache_bytes()), want) << student.name;
  }
}

std::vector<GeneratedAnswer> speak(Speaker& speaker,
                                   std::int64_t batch,
                                   const std::vector<std::vector<std::int32_t>>& prompts,
                                   std::uint64_t first_stream,
                                   const GenerateOptions& options) {
  Generator generator = speaker.generator(batch);
  std::vector<GenerateRequest> requests;
  for (const std::vector<std::int32_t>& prompt : prompts) {
    requests.push_back({prompt, first_stream + requests.size()});
  }
  return generate(speaker.context(), generator, requests, options);
}

std::size_t argmax_of_row(const ConstTensorView& logits, std::int64_t row) {
  const std::vector<double> values = to_doubles(logits.rows(row, row + 1));
  return static_cast<std::size_t>(std::max_element(values.begin(), values.end()) - values.begin());
}

// 20,000 tokens past a maximum position of 1,024: the process must not grow after the first
// thousand. A batch of three, so that sequences end and slots are used again on the way.
TEST(Generate, ProcessMemoryOfAStudentStaysAsItIs) {
  constexpr std::size_t kMebibyte = std::size_t{1} << 20;
  const ModelConfig teacher = tiny_teacher();
  for (const char* preset : {"bifocal", "swa_sink_tokens"}) {
    Speaker speaker(
        tiny_student(teacher, make_mixers(preset, least_budget(preset, teacher) + 20, {}, teacher)),
        DType::f32);
    Generator generator = speaker.generator(3);
    std::vector<GenerateRequest> requests;
    for (const std::int64_t length : {5, 300, 40, 7, 120, 33, 1, 64}) {
      requests.push_back({random_ids(length, requests.size()), requests.size()});
    }
    std::size_t tokens = 0;
    std::size_t early = 0;
    generate(speaker.context(),
             generator,
             requests,
             {.max_new_tokens = 2500, .temperature = 1.0},
             {.on_token = [&](std::int64_t, std::int32_t) {
               if (++tokens == 1000) {
                 early = resident_bytes();
               }
             }});
    EXPECT_EQ(tokens, 20000U);
    EXPECT_GT(early, 0U);
    EXPECT_LT(resident_bytes(), early + kMebibyte) << preset;
  }
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

// More requests than slots, of uneven lengths, so that every slot is used again while others run.
TEST(Generate, AnswersDoNotDependOnTheBatch) {
  for (const ModelConfig& config : all_models()) {
    Speaker speaker(config, DType::f32);
    std::vector<std::vector<std::int32_t>> prompts;
    for (const std::int64_t length : {30, 1, 12, 50, 3, 17, 2, 25}) {
      prompts.push_back(random_ids(length, 7 + prompts.size()));
    }
    for (const double temperature : {0.0, 1.0}) {
      const GenerateOptions options{.max_new_tokens = 25,
                                    .temperature = temperature,
                                    .top_k = 40,
                                    .top_p = 0.95,
                                    .seed = 3,
                                    .stop_ids = {2, 11, 30}};
      std::vector<std::vector<std::int32_t>> alone;
      for (std::size_t i = 0; i < prompts.size(); ++i) {
        alone.push_back(speak(speaker, 1, {prompts[i]}, 100 + i, options)[0].ids);
      }
      for (const std::int64_t batch : {1, 2, 3, 8, 20}) {
        const auto together = speak(speaker, batch, prompts, 100, options);
        for (std::size_t i = 0; i < prompts.size(); ++i) {
          EXPECT_EQ(together[i].ids, alone[i]);
        }
      }
    }
  }
}

TEST(Generate, EventsTellEveryTokenAndEveryAnswer) {
  Speaker speaker(tiny_teacher());
  Generator generator = speaker.generator(2);
  std::vector<GenerateRequest> requests;
  for (std::uint64_t i = 0; i < 5; ++i) {
    requests.push_back({random_ids(4, i), i});
  }
  std::vector<std::vector<std::int32_t>> told(5);
  std::vector<std::int64_t> finished;
  const auto answers = generate(
      speaker.context(),
      generator,
      requests,
      {.max_new_tokens = 30, .temperature = 1.0, .stop_ids = {3, 4, 5, 6, 7, 8}},
      {.on_token = [&](std::int64_t request,
                       std::int32_t id) { told[static_cast<std::size_t>(request)].push_back(id); },
       .on_finish =
           [&](std::int64_t request, const GeneratedAnswer& answer) {
             finished.push_back(request);
             EXPECT_EQ(answer.ids, told[static_cast<std::size_t>(request)]);
           }});
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(told[i], answers[i].ids);
    EXPECT_EQ(answers[i].stopped, answers[i].ids.back() >= 3 && answers[i].ids.back() <= 8);
  }
  std::ranges::sort(finished);
  EXPECT_EQ(finished, (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
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

// A second turn goes on where the first ended: as if all had been one prompt.
TEST(Generate, AConversationContinuesWithoutReadingItselfAgain) {
  for (const ModelConfig& config : all_models()) {
    Speaker speaker(config);
    const GenerateOptions options{.max_new_tokens = 15};
    Generator generator = speaker.generator(1);
    std::vector<std::int32_t> all = random_ids(30, 4);
    const auto first = continue_sequence(speaker.context(), generator, {all}, options);
    const std::vector<std::int32_t> turn = {first.ids.back(), 4, 5, 6};
    std::vector<std::int32_t> told;
    const auto second =
        continue_sequence(speaker.context(), generator, {turn}, options, [&](std::int32_t id) {
          told.push_back(id);
        });
    EXPECT_EQ(told, second.ids);
    all.insert(all.end(), first.ids.begin(), first.ids.end() - 1);
    all.insert(all.end(), turn.begin(), turn.end());
    EXPECT_EQ(generator.tokens(0), static_cast<std::int64_t>(all.size()) + 14);
    EXPECT_EQ(second.ids, speak(speaker, 1, {all}, 0, options)[0].ids);
  }
}

TEST(Generate, TakesNoNewTokensAndNoPrompts) {
  Speaker speaker(tiny_teacher());
  EXPECT_TRUE(speak(speaker, 2, {{1, 2, 3}}, 0, {.max_new_tokens = 0})[0].ids.empty());
  EXPECT_TRUE(speak(speaker, 2, {}, 0, {.max_new_tokens = 4}).empty());
}

TEST(Generate, RefusesEmptyPromptsAndForeignIds) {
  Speaker speaker(tiny_teacher());
  EXPECT_THROW(speak(speaker, 1, {{1}, {}}, 0, {}), Error);
  EXPECT_THROW(speak(speaker, 1, {{1, 53}}, 0, {}), Error);
  EXPECT_THROW(speak(speaker, 1, {{-1}}, 0, {}), Error);
}

}  // namespace

}  // namespace bifocal::test
