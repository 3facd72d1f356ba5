// RMSNorm against its definition in double.
#include "ops/rms_norm.h"

#include "support/op_test.h"

namespace bifocal::test {

namespace {

class RmsNorm : public OpTest {};

struct Size {
  std::int64_t rows, width;
};

const std::vector<Size> kSizes = {
    {0, 8}, {1, 1}, {3, 15}, {16, 16}, {31, 17}, {70, 64}, {3000, 33}};

std::vector<double> definition(const ConstTensorView& x,
                               const ConstTensorView& weight,
                               double eps) {
  const auto a = to_doubles(x);
  const auto w = to_doubles(weight);
  std::vector<double> y(a.size());
  for (std::size_t row = 0; row < a.size() / w.size(); ++row) {
    double squares = 0.0;
    for (std::size_t i = 0; i < w.size(); ++i) {
      squares += a[row * w.size() + i] * a[row * w.size() + i];
    }
    const double rms = std::sqrt(squares / static_cast<double>(w.size()) + eps);
    for (std::size_t i = 0; i < w.size(); ++i) {
      y[row * w.size() + i] = a[row * w.size() + i] / rms * w[i];
    }
  }
  return y;
}

TEST_F(RmsNorm, ForwardMatchesDefinitionAlsoInPlace) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const Size s : kSizes) {
      SCOPED_TRACE(fmt::format("{} x {}", s.rows, s.width));
      const Tensor x = normal(dtype, {s.rows, s.width}, 1, 3.0);
      const Tensor weight = normal(dtype, {s.width}, 2);
      const Tensor y = empty(dtype, {s.rows, s.width});
      const auto want = definition(x, weight, 1e-5);
      run(stream_, RmsNormForward{y, x, weight, 1e-5});
      // A few roundings of an element, after a sum whose own error is below 1e-6.
      EXPECT_CLOSE(y, want, dtype == DType::f32 ? 1e-6 : 1e-14);
      run(stream_, RmsNormForward{x, x, weight, 1e-5});
      EXPECT_SAME_BITS(x, y);
    }
  }
}

TEST_F(RmsNorm, GradientsMatchFiniteDifferences) {
  for (const Size s : {Size{5, 7}, Size{100, 3}}) {
    const Tensor x = normal(DType::f64, {s.rows, s.width}, 1);
    const Tensor weight = normal(DType::f64, {s.width}, 2);
    const Tensor d_y = normal(DType::f64, {s.rows, s.width}, 3);
    const Tensor y = empty(DType::f64, {s.rows, s.width});
    const Tensor d_x = empty(DType::f64, {s.rows, s.width});
    const Tensor d_weight = zeros(DType::f64, {s.width});
    run(stream_, RmsNormBackward{d_x, d_weight, d_y, x, weight, 1e-2});
    const auto loss = [&] {
      run(stream_, RmsNormForward{y, x, weight, 1e-2});
      return weighted_sum(y, d_y);
    };
    // Rows near zero bend quickly: the step's fourth power leaves about 1e-8.
    EXPECT_GRADIENT(x, d_x, loss, 1e-7);
    EXPECT_GRADIENT(weight, d_weight, loss);
  }
}

TEST_F(RmsNorm, FloatGradientMatchesDouble) {
  for (const Size s : kSizes) {
    SCOPED_TRACE(fmt::format("{} x {}", s.rows, s.width));
    const Shape shape{s.rows, s.width};
    const Tensor x = normal(DType::f32, shape, 1);
    const Tensor weight = normal(DType::f32, {s.width}, 2);
    const Tensor d_y = normal(DType::f32, shape, 3);
    const Tensor d_x = normal(DType::f32, shape, 4);
    const Tensor d_weight = normal(DType::f32, {s.width}, 5);
    const Tensor want_d_x = doubles(d_x);
    const Tensor want_d_weight = doubles(d_weight);
    run(stream_,
        RmsNormBackward{
            want_d_x, want_d_weight, doubles(d_y), doubles(x), doubles(weight), 1e-6, true});
    run(stream_, RmsNormBackward{d_x, d_weight, d_y, x, weight, 1e-6, true});
    EXPECT_CLOSE(d_x, want_d_x, 2e-6);
    EXPECT_CLOSE(d_weight, want_d_weight, 1e-6);
  }
}

TEST_F(RmsNorm, GradientIsTheSameInPlaceAndForAnyNumberOfThreads) {
  const Shape shape{1000, 48};
  const Tensor x = normal(DType::f32, shape, 1);
  const Tensor weight = normal(DType::f32, {48}, 2);
  const Tensor d_y = normal(DType::f32, shape, 3);
  const Tensor want_d_x = empty(DType::f32, shape);
  const Tensor want_d_weight = zeros(DType::f32, {48});
  with_threads(1, [&] { run(stream_, RmsNormBackward{want_d_x, want_d_weight, d_y, x, weight}); });
  const Tensor without_weight = empty(DType::f32, shape);
  run(stream_, RmsNormBackward{without_weight, {}, d_y, x, weight});
  EXPECT_SAME_BITS(without_weight, want_d_x);
  for (const int threads : {2, 3, 4}) {
    const Tensor in_place = normal(DType::f32, shape, 3);
    const Tensor d_weight = zeros(DType::f32, {48});
    with_threads(threads, [&] {
      run(stream_, RmsNormBackward{in_place, d_weight, in_place, x, weight});
    });
    EXPECT_SAME_BITS(in_place, want_d_x);
    EXPECT_SAME_BITS(d_weight, want_d_weight);
  }
}

TEST_F(RmsNorm, RefusesWrongShapes) {
  const Tensor x = normal(DType::f32, {4, 3}, 1);
  const Tensor weight = normal(DType::f32, {4}, 2);
  const Tensor y = empty(DType::f32, {4, 3});
  EXPECT_THROW(run(stream_, RmsNormForward{y, x, weight}), Error);
  EXPECT_THROW(run(stream_, RmsNormBackward{y, {}, x, x, weight}), Error);
}

}  // namespace

}  // namespace bifocal::test
