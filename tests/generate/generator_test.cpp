// Prompts in chunks and tokens one by one are the forward pass, with memory that does not grow.
#include "generate/generator.h"

#include <gtest/gtest.h>

#include "plan/cache_memory.h"
#include "support/compare.h"
#include "support/fill_weights.h"
#include "support/speaker.h"

namespace bifocal::test {

namespace {

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
    fill_weights(speaker.context(),
                 narrow,
                 [&](const Parameter& parameter, std::int64_t first, const TensorView& piece) {
                   for (std::int64_t i = 0; i < piece.size(); ++i) {
                     piece.as<BFloat16>()[i] = to_bfloat16(static_cast<float>(
                         values.at(parameter.name)[static_cast<std::size_t>(first + i)]));
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
    EXPECT_NE(std::string(error.what()).find("full attention cannot grow from"), std::string::npos)
        << error.what();
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

}  // namespace

}  // namespace bifocal::test
