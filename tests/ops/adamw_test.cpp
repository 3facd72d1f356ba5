// AdamW against its formula in double.
#include "ops/adamw.h"

#include "support/op_test.h"

namespace bifocal::test {

namespace {

class AdamWTest : public OpTest {
 protected:
  struct State {
    Tensor parameter, first, second;
  };

  State make(DType dtype, std::int64_t size) {
    return {normal(dtype, {size}, 1), zeros(dtype, {size}), zeros(dtype, {size})};
  }

  static AdamW op(const State& s, const ConstTensorView& gradient, std::int64_t step) {
    AdamW update{s.parameter, s.first, s.second, gradient};
    update.rate = 1e-2;
    update.decay = 0.1;
    update.grad_scale = 0.5;
    update.step = step;
    return update;
  }
};

TEST_F(AdamWTest, FollowsTheFormulaOverTenSteps) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const std::int64_t size : {0, 1, 31, 1000}) {
      const State s = make(dtype, size);
      auto p = to_doubles(s.parameter);
      auto m = to_doubles(s.first);
      auto v = m;
      for (std::int64_t step = 1; step <= 10; ++step) {
        const Tensor gradient = normal(dtype, {size}, 10 + static_cast<std::uint64_t>(step));
        run(stream_, op(s, gradient, step));
        const auto g = to_doubles(gradient);
        for (std::size_t i = 0; i < g.size(); ++i) {
          const double scaled = 0.5 * g[i];
          m[i] = 0.9 * m[i] + (1.0 - 0.9) * scaled;
          v[i] = 0.95 * v[i] + (1.0 - 0.95) * scaled * scaled;
          p[i] *= 1.0 - 1e-2 * 0.1;
          p[i] -= 1e-2 * (m[i] / (1.0 - std::pow(0.9, step))) /
                  (std::sqrt(v[i] / (1.0 - std::pow(0.95, step))) + 1e-8);
        }
      }
      // Ten updates, each rounding the parameter (of size 3) once or twice.
      const double bound = dtype == DType::f32 ? 2e-6 : 1e-14;
      EXPECT_WITHIN(s.parameter, p, bound);
      EXPECT_WITHIN(s.first, m, bound);
      EXPECT_WITHIN(s.second, v, bound);
    }
  }
}

TEST_F(AdamWTest, AnyCutGivesTheSameBits) {
  const std::int64_t size = 1003;
  const Tensor gradient = normal(DType::f32, {size}, 5);
  const State whole = make(DType::f32, size);
  const State cut = make(DType::f32, size);
  for (std::int64_t step = 1; step <= 3; ++step) {
    run(stream_, op(whole, gradient, step));
    for (const auto& [begin, end] : {std::pair{0, 13}, {13, 14}, {14, 500}, {500, 1003}}) {
      AdamW part = op(cut, gradient.rows(begin, end), step);
      part.parameter = part.parameter.rows(begin, end);
      part.first = part.first.rows(begin, end);
      part.second = part.second.rows(begin, end);
      run(stream_, part);
    }
  }
  EXPECT_SAME_BITS(cut.parameter, whole.parameter);
  EXPECT_SAME_BITS(cut.first, whole.first);
  EXPECT_SAME_BITS(cut.second, whole.second);
}

// The moments lose what their rounding takes and nothing else: one step from given moments.
TEST_F(AdamWTest, NarrowMomentsAreRoundedOnce) {
  constexpr std::int64_t kSize = 203;
  const State wide = make(DType::f32, kSize);
  const State narrow{normal(DType::f32, {kSize}, 1),
                     memory_.empty(Region::activations, DType::bf16, {kSize}),
                     memory_.empty(Region::activations, DType::bf16, {kSize})};
  const Tensor copy = memory_.empty(Region::activations, DType::bf16, {kSize});
  for (std::int64_t i = 0; i < kSize; ++i) {
    const BFloat16 m = to_bfloat16(0.01F * static_cast<float>(i - 100));
    const BFloat16 v = to_bfloat16(0.003F * static_cast<float>(i));
    narrow.first.as<BFloat16>()[i] = m;
    narrow.second.as<BFloat16>()[i] = v;
    wide.first.as<float>()[i] = to_float(m);
    wide.second.as<float>()[i] = to_float(v);
  }
  const Tensor gradient = normal(DType::f32, {kSize}, 11);
  run(stream_, op(wide, gradient, 7));
  AdamW update = op(narrow, gradient, 7);
  update.copy = copy;
  run(stream_, update);
  EXPECT_SAME_BITS(narrow.parameter, wide.parameter);
  for (std::int64_t i = 0; i < kSize; ++i) {
    EXPECT_EQ(narrow.first.as<BFloat16>()[i].bits, to_bfloat16(wide.first.as<float>()[i]).bits);
    EXPECT_EQ(narrow.second.as<BFloat16>()[i].bits, to_bfloat16(wide.second.as<float>()[i]).bits);
    EXPECT_EQ(copy.as<BFloat16>()[i].bits, to_bfloat16(wide.parameter.as<float>()[i]).bits);
  }
}

TEST_F(AdamWTest, ZeroGradientOnlyDecays) {
  const State s = make(DType::f64, 8);
  const auto before = to_doubles(s.parameter);
  run(stream_, op(s, zeros(DType::f64, {8}), 1));
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(s.parameter.as<double>()[i], before[i] * (1.0 - 1e-2 * 0.1));
  }
}

TEST_F(AdamWTest, RefusesStepZeroAndUnequalSizes) {
  const State s = make(DType::f32, 8);
  EXPECT_THROW(run(stream_, op(s, zeros(DType::f32, {8}), 0)), Error);
  EXPECT_THROW(run(stream_, op(s, zeros(DType::f32, {7}), 1)), Error);
}

}  // namespace

}  // namespace bifocal::test
