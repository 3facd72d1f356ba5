// Sliding attention: the training path against the definition, finite differences, and properties.
#include "ops/sliding_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <omp.h>

#include "core/memory.h"
#include "ops/attention_problem.h"
#include "support/compare.h"
#include "support/fill.h"
#include "support/gradient_check.h"

namespace bifocal {

namespace {

using test::kFull;
using test::Layout;
using test::Problem;

std::vector<double> constant_like(const Tensor& x, double value) {
  return std::vector<double>(static_cast<std::size_t>(x.size()), value);
}

void expect_close(const Problem& got, const Problem& want, double output, double gradient) {
  EXPECT_CLOSE(got.out, want.out, output);
  EXPECT_CLOSE(got.lse, want.lse, output);
  // Gradients that cancel (of k at a window of 1) are measured on the scale of the largest one.
  double scale = 0.0;
  for (const Tensor* x : want.gradients()) {
    for (const double value : test::to_doubles(*x)) {
      scale = std::max(scale, std::abs(value));
    }
  }
  for (std::size_t i = 0; i < want.gradients().size(); ++i) {
    SCOPED_TRACE(fmt::format("gradient {}", i));
    EXPECT_WITHIN(*got.gradients()[i], *want.gradients()[i], gradient * scale);
  }
}

void expect_same_bits(const Problem& got, const Problem& want) {
  EXPECT_SAME_BITS(got.out, want.out);
  EXPECT_SAME_BITS(got.lse, want.lse);
  for (std::size_t i = 0; i < want.gradients().size(); ++i) {
    SCOPED_TRACE(fmt::format("gradient {}", i));
    EXPECT_SAME_BITS(*got.gradients()[i], *want.gradients()[i]);
  }
}

// double: sums of some hundred terms round to a few 1e-15 of the largest; 1e-12 leaves room.
// float: the bounds of the specification for float32 against float64 references.
void expect_matches_definition(const Layout& layout) {
  SCOPED_TRACE(layout.describe());
  Memory memory;
  const Problem stored(memory, layout, DType::f32);
  const Problem want(stored, DType::f64);
  const Problem got(stored, DType::f64);
  want.define_both();
  got.run_both();
  expect_close(got, want, 1e-12, 1e-12);
  stored.run_both();
  expect_close(stored, want, 1e-5, 2e-5);
}

TEST(SlidingAttention, MatchesDefinitionAcrossAwkwardDocumentsAndWindows) {
  for (const std::int64_t window : {std::int64_t{1}, std::int64_t{7}, std::int64_t{64}, kFull}) {
    const std::int64_t w = std::min<std::int64_t>(window, 40);
    Layout layout;
    layout.documents = {1, std::max<std::int64_t>(w - 1, 1), w, w + 1, 63, 64, 65, 1, 1};
    layout.window = window;
    expect_matches_definition(layout);
    layout.has_sink = false;
    layout.pinned = 4;
    expect_matches_definition(layout);
  }
}

TEST(SlidingAttention, MatchesDefinitionForHeadGroupsAndHeadDims) {
  for (const std::int64_t group : {1, 2, 3, 4}) {
    for (const std::int64_t dim : {8, 16, 32, 64}) {
      Layout layout;
      layout.documents = {37, 60};
      layout.window = 33;
      layout.kv_heads = 1 + group % 2;
      layout.heads = group * layout.kv_heads;
      layout.dim = dim;
      layout.pinned = group == 3 ? 2 : 0;
      expect_matches_definition(layout);
    }
  }
}

TEST(SlidingAttention, MatchesDefinitionAtBlockAndTileEdges) {
  for (const std::int64_t tokens : {1, 31, 32, 33, 255, 256, 257, 289, 601}) {
    Layout layout;
    layout.documents = {tokens};
    layout.heads = 2;
    layout.kv_heads = 1;
    expect_matches_definition(layout);
    layout.window = 257;
    layout.pinned = 3;
    expect_matches_definition(layout);
  }
}

TEST(SlidingAttention, MatchesDefinitionWithHaloKeys) {
  for (const std::int64_t halo : {1, 5, 31, 64, 100}) {
    Layout layout;
    layout.documents = {50, 60, 41};
    layout.halo = halo;
    layout.window = 45;
    layout.pinned = halo == 31 ? 4 : 0;
    expect_matches_definition(layout);
  }
}

TEST(SlidingAttention, MatchesDefinitionWithManyPinnedKeys) {
  Layout layout;
  layout.documents = {700, 300};
  layout.window = 3;
  layout.pinned = 300;
  layout.heads = 1;
  layout.kv_heads = 1;
  expect_matches_definition(layout);
}

TEST(SlidingAttention, MatchesDefinitionWherePinnedRangesLieFarApart) {
  Layout layout;
  layout.documents = {20, 12};
  layout.window = 2;
  layout.pinned = 600;
  Memory memory;
  const Problem got(memory, layout, DType::f64);
  for (std::int64_t t = 20; t < 32; ++t) {  // the first document sees [0, ..), this one [900, 903)
    got.pinned_begin.as<std::int32_t>()[t] = 900;
    got.pinned_end.as<std::int32_t>()[t] = 903;
  }
  const Problem want(got, DType::f64);
  want.define_both();
  got.run_both();
  expect_close(got, want, 1e-12, 1e-12);
}

TEST(SlidingAttention, MatchesDefinitionUnderExtremeSinks) {
  for (const double mean : {-1e4, -50.0, 5.0, 50.0}) {
    Layout layout;
    layout.documents = {70, 30};
    layout.window = 20;
    layout.sink_mean = mean;
    Memory memory;
    const Problem stored(memory, layout, DType::f32);
    const Problem want(stored, DType::f64);
    want.define_both();
    stored.run_both();
    // An lse near 50 is stored to 4e-6 in float, which is the relative error of each probability.
    expect_close(stored, want, 1e-5, 2e-5);
  }
}

TEST(SlidingAttention, SinkThatTakesAllGivesZeroAndNoNan) {
  Layout layout;
  layout.sink_mean = 1000.0;
  Memory memory;
  const Problem problem(memory, layout, DType::f32);
  problem.run_both();
  EXPECT_EQ(test::max_abs_error(problem.out, constant_like(problem.out, 0.0)), 0.0);
  EXPECT_EQ(test::max_abs_error(problem.d_q, constant_like(problem.d_q, 0.0)), 0.0);
  EXPECT_EQ(test::max_abs_error(problem.d_k, constant_like(problem.d_k, 0.0)), 0.0);
  EXPECT_EQ(test::max_abs_error(problem.d_sink, constant_like(problem.d_sink, 0.5)), 0.0);
}

TEST(SlidingAttention, LargeLogitsDoNotOverflow) {
  Layout layout;
  layout.documents = {300};
  layout.window = 290;
  Memory memory;
  const Problem stored(memory, layout, DType::f32);
  for (std::int64_t i = 0; i < stored.q.size(); ++i) {
    stored.q.as<float>()[i] *= 100.0F;
  }
  const Problem want(stored, DType::f64);
  want.define_both();
  stored.run_both();
  // Logits of some hundreds are rounded to 3e-5, so probabilities carry 1e-4.
  EXPECT_CLOSE(stored.out, want.out, 3e-4);
  for (const Tensor* x : stored.gradients()) {
    for (const double value : test::to_doubles(*x)) {
      ASSERT_TRUE(std::isfinite(value));
    }
  }
}

TEST(SlidingAttention, GradientsMatchFiniteDifferences) {
  Layout layout;
  layout.documents = {3, 41, 12};
  layout.halo = 7;
  layout.window = 9;
  layout.pinned = 2;
  Memory memory;
  const Problem p(memory, layout, DType::f64);
  test::fill(p.d_sink, [](std::int64_t) { return 0.0; });
  p.run_both();
  CpuStream cpu;
  const auto loss = [&] {
    run(cpu, p.forward());
    return test::weighted_sum(p.out, p.d_out);
  };
  EXPECT_GRADIENT(p.q, p.d_q, loss);
  EXPECT_GRADIENT(p.k, p.d_k, loss);
  EXPECT_GRADIENT(p.v, p.d_v, loss);
  EXPECT_GRADIENT(p.sink, p.d_sink, loss);
  EXPECT_GRADIENT(p.pinned_k, p.d_pinned_k, loss);
  EXPECT_GRADIENT(p.pinned_v, p.d_pinned_v, loss);
}

TEST(SlidingAttention, WindowOfOneReturnsTheOwnValue) {
  Layout layout;
  layout.window = 1;
  layout.has_sink = false;
  Memory memory;
  const Problem p(memory, layout, DType::f32);
  p.run_both();
  for (std::int64_t t = 0; t < 64; ++t) {
    for (std::int64_t h = 0; h < 4; ++h) {
      for (std::int64_t i = 0; i < 8; ++i) {
        ASSERT_EQ(p.out.as<float>()[(t * 4 + h) * 8 + i], p.v.as<float>()[(t * 2 + h / 2) * 8 + i]);
      }
    }
  }
}

TEST(SlidingAttention, OtherDocumentsCannotMoveABit) {
  for (const DType type : {DType::f32, DType::f64}) {
    Layout layout;
    layout.documents = {40, 50, 29};
    layout.window = 30;
    Memory memory;
    const Problem before(memory, layout, type);
    const Problem after(before, type);
    for (const Tensor* x : {&after.q, &after.k, &after.v, &after.d_out}) {
      test::fill_normal(x->rows(0, 40), 11, 30.0);
      test::fill_normal(x->rows(90, 119), 12, 30.0);
    }
    before.run_both();
    after.run_both();
    EXPECT_SAME_BITS(after.out.rows(40, 90), before.out.rows(40, 90));
    EXPECT_SAME_BITS(after.lse.rows(40, 90), before.lse.rows(40, 90));
    EXPECT_SAME_BITS(after.d_q.rows(40, 90), before.d_q.rows(40, 90));
    EXPECT_SAME_BITS(after.d_k.rows(40, 90), before.d_k.rows(40, 90));
    EXPECT_SAME_BITS(after.d_v.rows(40, 90), before.d_v.rows(40, 90));
    EXPECT_GT(test::max_abs_error(after.out, before.out), 0.1);
  }
}

TEST(SlidingAttention, KeysLeftOfTheWindowCannotMoveABit) {
  Layout layout;
  layout.documents = {120};
  layout.window = 17;
  Memory memory;
  const Problem before(memory, layout, DType::f32);
  const Problem after(before, DType::f32);
  test::fill_normal(after.k.rows(0, 50), 11, 30.0);
  test::fill_normal(after.v.rows(0, 50), 12, 30.0);
  before.run_both();
  after.run_both();
  EXPECT_SAME_BITS(after.out.rows(66, 120), before.out.rows(66, 120));
  EXPECT_SAME_BITS(after.d_q.rows(66, 120), before.d_q.rows(66, 120));
}

TEST(SlidingAttention, ThreadsDoNotChangeABit) {
  Layout layout;
  layout.documents = {500, 77, 200};
  layout.window = 300;
  layout.pinned = 4;
  Memory memory;
  const Problem one(memory, layout, DType::f32);
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  one.run_both();
  for (const int count : {2, 3}) {  // 2 share out whole heads, 3 parts of them
    const Problem several(one, DType::f32);
    omp_set_num_threads(count);
    several.run_both();
    expect_same_bits(several, one);
  }
  omp_set_num_threads(threads);
}

// The second half of `whole` as a shard that begins at key `split` with `halo` keys before it.
Problem second_half(const Problem& whole, const Layout& layout, std::int64_t split) {
  Layout shard = layout;
  shard.documents = {layout.keys() - split + layout.window - 1};
  shard.halo = layout.window - 1;
  Problem half(whole.memory, shard, whole.q.dtype());
  const std::int64_t from = split - shard.halo;
  const auto copy = [](const Tensor& to, const Tensor& x, std::int64_t begin) {
    const TensorView rows = x.rows(begin, x.shape()[0]);
    std::memcpy(to.view().data, rows.data, rows.bytes());
  };
  copy(half.q, whole.q, split);
  copy(half.d_out, whole.d_out, split);
  copy(half.k, whole.k, from);
  copy(half.v, whole.v, from);
  for (std::int64_t t = 0; t < half.key_begin.size(); ++t) {
    half.key_begin.as<std::int32_t>()[t] =
        static_cast<std::int32_t>(whole.key_begin.as<std::int32_t>()[split + t] - from);
  }
  half.run_both();
  return half;
}

TEST(SlidingAttention, ShardWithHaloEqualsItsPartOfTheRow) {
  Layout layout;
  layout.documents = {90, 102};
  layout.window = 70;
  Memory memory;
  const Problem whole(memory, layout, DType::f64);
  whole.run_both();
  for (const std::int64_t split : {96, 101}) {
    const Problem half = second_half(whole, layout, split);
    if (split % 32 == 0) {  // blocks and tiles fall on the same tokens, so nothing differs
      EXPECT_SAME_BITS(half.out, whole.out.rows(split, 192));
      EXPECT_SAME_BITS(half.lse, whole.lse.rows(split, 192));
      EXPECT_SAME_BITS(half.d_q, whole.d_q.rows(split, 192));
    }
    // Other blocks sum the same terms in another order.
    EXPECT_CLOSE(half.out, whole.out.rows(split, 192), 1e-14);
    EXPECT_CLOSE(half.d_q, whole.d_q.rows(split, 192), 1e-13);
  }
}

TEST(SlidingAttention, GradientsOfShardsAddUpToTheRows) {
  Layout layout;
  layout.documents = {90, 102};
  layout.window = 70;
  Memory memory;
  const Problem whole(memory, layout, DType::f64);
  whole.run_both();
  const std::int64_t split = 101;
  Layout left = layout;
  left.documents = {90, split - 90};
  Problem first(memory, left, DType::f64);
  for (const auto& [to, x] : {std::pair{&first.q, &whole.q},
                              std::pair{&first.k, &whole.k},
                              std::pair{&first.v, &whole.v},
                              std::pair{&first.d_out, &whole.d_out}}) {
    std::memcpy(to->view().data, x->view().data, to->view().bytes());
  }
  first.run_both();
  const Problem second = second_half(whole, layout, split);
  const auto sum = [&](const Tensor& a, const Tensor& b) {
    std::vector<double> total = constant_like(whole.d_k, 0.0);
    const std::vector<double> x = test::to_doubles(a);
    const std::vector<double> y = test::to_doubles(b);
    for (std::size_t i = 0; i < x.size(); ++i) {
      total[i] += x[i];
    }
    for (std::size_t i = 0; i < y.size(); ++i) {
      total[total.size() - y.size() + i] += y[i];
    }
    return total;
  };
  EXPECT_CLOSE(sum(first.d_k, second.d_k), test::to_doubles(whole.d_k), 1e-13);
  EXPECT_CLOSE(sum(first.d_v, second.d_v), test::to_doubles(whole.d_v), 1e-13);
  for (std::int64_t h = 0; h < 4; ++h) {  // each starts at 0.5
    EXPECT_NEAR(first.d_sink.as<double>()[h] + second.d_sink.as<double>()[h] - 0.5,
                whole.d_sink.as<double>()[h],
                1e-12);
  }
}

TEST(SlidingAttention, EmptyShardOverwritesGradientsOfItsHalo) {
  Layout layout;
  layout.documents = {20};
  layout.halo = 20;
  layout.pinned = 2;
  Memory memory;
  const Problem p(memory, layout, DType::f32);
  p.run_both();
  EXPECT_EQ(test::max_abs_error(p.d_k, constant_like(p.d_k, 0.0)), 0.0);
  EXPECT_EQ(test::max_abs_error(p.d_pinned_v, constant_like(p.d_pinned_v, 0.0)), 0.0);
  EXPECT_EQ(test::max_abs_error(p.d_sink, constant_like(p.d_sink, 0.5)), 0.0);
  layout.documents = {};
  layout.halo = 0;
  layout.pinned = 0;
  const Problem nothing(memory, layout, DType::f32);
  nothing.run_both();
  EXPECT_EQ(nothing.out.size(), 0);
}

TEST(SlidingAttention, LongFullWindowsMatchTheDefinition) {
  Layout layout;
  layout.documents = {4100};
  layout.heads = 1;
  layout.kv_heads = 1;
  Memory memory;
  const Problem stored(memory, layout, DType::f32);
  const Problem want(stored, DType::f64);
  want.define_both();
  stored.run_both();
  expect_close(stored, want, 1e-5, 2e-5);
}

TEST(SlidingAttention, TheSinksGradientAloneHasTheSameBits) {
  for (const DType type : {DType::f32, DType::f64}) {
    for (const std::int64_t pinned : {0, 4}) {
      Layout layout;
      layout.documents = {1, 300, 50};
      layout.halo = 30;
      layout.window = 40;
      layout.pinned = pinned;
      Memory memory;
      const Problem p(memory, layout, type);
      p.run_both();
      const Tensor alone = memory.empty(Region::activations, type, p.sink.shape());
      test::fill(alone, [](std::int64_t) { return 0.5; });  // where d_sink of run_both started
      SlidingAttentionBackward backward = p.backward();
      backward.d_q = backward.d_k = backward.d_v = backward.d_pinned_k = backward.d_pinned_v = {};
      backward.d_sink = alone;
      CpuStream cpu;
      Stream stream{&cpu};
      run(stream, backward);
      EXPECT_SAME_BITS(alone, p.d_sink);
    }
  }
}

TEST(SlidingAttention, RefusesSomeGradientsWithoutTheOthers) {
  Memory memory;
  const Layout layout;
  const Problem p(memory, layout, DType::f32);
  p.run_both();
  CpuStream cpu;
  Stream stream{&cpu};
  SlidingAttentionBackward backward = p.backward();
  backward.d_q = {};
  EXPECT_THROW(run(stream, backward), Error);
  backward = p.backward();
  backward.d_k = {};
  EXPECT_THROW(run(stream, backward), Error);
}

TEST(SlidingAttention, RefusesWrongShapesTypesAndRanges) {
  Memory memory;
  const Layout layout;
  const Problem p(memory, layout, DType::f32);
  const Problem wide(memory, layout, DType::f64);
  CpuStream cpu;
  Stream stream{&cpu};
  SlidingAttentionForward forward = p.forward();
  forward.inputs.v = wide.v;
  EXPECT_THROW(run(stream, forward), Error);
  forward = p.forward();
  forward.inputs.k = p.k.rows(0, 63);
  EXPECT_THROW(run(stream, forward), Error);
  forward = p.forward();
  forward.lse = p.out;
  EXPECT_THROW(run(stream, forward), Error);
  SlidingAttentionBackward backward = p.backward();
  backward.d_sink = {};
  EXPECT_THROW(run(stream, backward), Error);
  p.key_begin.as<std::int32_t>()[5] = 6;
  EXPECT_THROW(run(stream, p.forward()), Error);
  p.key_begin.as<std::int32_t>()[5] = 2;
  EXPECT_THROW(run(stream, p.forward()), Error);  // query 6 begins at 0 again
  p.key_begin.as<std::int32_t>()[5] = -1;
  EXPECT_THROW(run(stream, p.backward()), Error);
}

}  // namespace

}  // namespace bifocal
