// Rotary positions.
#include "ops/rope.h"

#include <complex>
#include <numbers>

#include "support/op_test.h"

namespace bifocal::test {

namespace {

class Rope : public OpTest {
 protected:
  struct Tables {
    Tensor cos, sin;
  };

  Tables tables(DType dtype, const std::vector<std::int32_t>& positions, int head_dim) {
    const auto tokens = static_cast<std::int64_t>(positions.size());
    Tables t{empty(dtype, {tokens, head_dim / 2}), empty(dtype, {tokens, head_dim / 2})};
    run(stream_,
        RopeTable{t.cos,
                  t.sin,
                  tensor_of(memory_, positions),
                  tensor_of(memory_, rope_frequencies(head_dim, 1e4, {}))});
    return t;
  }
};

TEST_F(Rope, FrequenciesFollowTheta) {
  const auto plain = rope_frequencies(8, 1e4, {});
  const std::vector<double> want = {1.0, 1e-1, 1e-2, 1e-3};
  EXPECT_WITHIN(plain, want, 1e-16);
}

TEST_F(Rope, ScalingKeepsShortWavesAndStretchesLongOnes) {
  const RopeScaling scaling{32.0, 1.0, 4.0, 8192.0};
  const auto plain = rope_frequencies(128, 5e5, {});
  const auto scaled = rope_frequencies(128, 5e5, scaling);
  for (std::size_t i = 0; i < plain.size(); ++i) {
    const double wave = 2.0 * std::numbers::pi / plain[i];
    if (wave < 8192.0 / 4.0) {
      EXPECT_EQ(scaled[i], plain[i]);
    } else if (wave > 8192.0) {
      EXPECT_DOUBLE_EQ(scaled[i], plain[i] / 32.0);
    } else {
      const double kept = (8192.0 / wave - 1.0) / 3.0;
      EXPECT_NEAR(scaled[i], plain[i] * (kept + (1.0 - kept) / 32.0), 1e-15);
    }
  }
}

TEST_F(Rope, RotatesPairsOfHalvesByPositionTimesFrequency) {
  const std::vector<std::int32_t> positions = {0, 1, 2, 0, 40000, 131071};
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const int head_dim : {2, 10, 64}) {
      const Tables t = tables(dtype, positions, head_dim);
      const Tensor x = normal(dtype, {6, 3, head_dim}, 1);
      const auto before = to_doubles(x);
      run(stream_, RopeRotate{x, t.cos, t.sin});
      std::vector<double> want(before.size());
      const auto half = static_cast<std::size_t>(head_dim / 2);
      const auto frequencies = rope_frequencies(head_dim, 1e4, {});
      for (std::size_t row = 0; row < 18; ++row) {
        for (std::size_t i = 0; i < half; ++i) {
          const std::size_t at = row * 2 * half + i;
          const std::complex<double> z(before[at], before[at + half]);
          const auto turned = z * std::polar(1.0, positions[row / 3] * frequencies[i]);
          want[at] = turned.real();
          want[at + half] = turned.imag();
        }
      }
      // Angles are formed in double: float32 only rounds cos, sin and the products.
      EXPECT_CLOSE(x, want, dtype == DType::f32 ? 3e-7 : 1e-14);
    }
  }
}

TEST_F(Rope, PositionZeroChangesNoBit) {
  const Tables t = tables(DType::f32, {0}, 16);
  const Tensor x = normal(DType::f32, {1, 2, 16}, 1);
  const Tensor kept = normal(DType::f32, {1, 2, 16}, 1);
  run(stream_, RopeRotate{x, t.cos, t.sin});
  EXPECT_SAME_BITS(x, kept);
}

TEST_F(Rope, InverseIsTheGradient) {
  const Tables t = tables(DType::f64, {3, 0, 17}, 6);
  const Tensor x = normal(DType::f64, {3, 2, 6}, 1);
  const Tensor y = empty(DType::f64, {3, 2, 6});
  const Tensor d_y = normal(DType::f64, {3, 2, 6}, 2);
  const Tensor d_x = doubles(d_y);
  run(stream_, RopeRotate{d_x, t.cos, t.sin, true});
  EXPECT_GRADIENT(x, d_x, [&] {
    std::copy_n(x.as<double>(), x.size(), y.as<double>());
    run(stream_, RopeRotate{y, t.cos, t.sin});
    return weighted_sum(y, d_y);
  });
}

TEST_F(Rope, TakesNoTokens) {
  const Tables t = tables(DType::f32, {}, 8);
  const Tensor x = empty(DType::f32, {0, 2, 8});
  EXPECT_NO_THROW(run(stream_, RopeRotate{x, t.cos, t.sin}));
}

TEST_F(Rope, RefusesWrongShapes) {
  const Tables t = tables(DType::f32, {1, 2}, 8);
  const Tensor odd = empty(DType::f32, {2, 2, 7});
  const Tensor longer = empty(DType::f32, {3, 2, 8});
  EXPECT_THROW(run(stream_, RopeRotate{odd, t.cos, t.sin}), Error);
  EXPECT_THROW(run(stream_, RopeRotate{longer, t.cos, t.sin}), Error);
}

}  // namespace

}  // namespace bifocal::test
