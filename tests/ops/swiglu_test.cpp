// Gated MLP activation.
#include "ops/swiglu.h"

#include "support/op_test.h"

namespace bifocal::test {

namespace {

class Swiglu : public OpTest {};

TEST_F(Swiglu, ForwardMatchesDefinition) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const std::int64_t rows : {0, 1, 15, 17, 400}) {
      const Tensor gate = normal(dtype, {rows, 31}, 1, 4.0);
      const Tensor up = normal(dtype, {rows, 31}, 2);
      const Tensor y = empty(dtype, {rows, 31});
      run(stream_, SwigluForward{y, gate, up});
      const auto g = to_doubles(gate);
      auto want = to_doubles(up);
      for (std::size_t i = 0; i < g.size(); ++i) {
        want[i] *= g[i] / (1.0 + std::exp(-g[i]));
      }
      EXPECT_CLOSE(y, want, dtype == DType::f32 ? 3e-7 : 1e-15);
    }
  }
}

TEST_F(Swiglu, ExtremeGatesStayFinite) {
  const Tensor gate = tensor_of<float>(memory_, {-1e30F, -200.0F, -88.0F, 88.0F, 200.0F, 1e30F});
  const Tensor up = tensor_of<float>(memory_, {1.0F, 1.0F, 1.0F, 1.0F, 1.0F, 1.0F});
  const Tensor y = empty(DType::f32, {1, 6});
  run(stream_, SwigluForward{y, gate.reshape({1, 6}), up.reshape({1, 6})});
  const std::vector<double> want = {0.0, 0.0, 0.0, 88.0, 200.0, 1e30F};
  EXPECT_WITHIN(y, want, 1e-30);
  const Tensor d_gate = empty(DType::f32, {1, 6});
  const Tensor d_up = empty(DType::f32, {1, 6});
  run(stream_,
      SwigluBackward{d_gate, d_up, up.reshape({1, 6}), gate.reshape({1, 6}), up.reshape({1, 6})});
  const std::vector<double> slopes = {0.0, 0.0, 0.0, 1.0, 1.0, 1.0};
  EXPECT_WITHIN(d_gate, slopes, 1e-30);
}

TEST_F(Swiglu, GradientsMatchFiniteDifferences) {
  const Shape shape{4, 7};
  const Tensor gate = normal(DType::f64, shape, 1, 2.0);
  const Tensor up = normal(DType::f64, shape, 2);
  const Tensor d_y = normal(DType::f64, shape, 3);
  const Tensor y = empty(DType::f64, shape);
  const Tensor d_gate = empty(DType::f64, shape);
  const Tensor d_up = empty(DType::f64, shape);
  run(stream_, SwigluBackward{d_gate, d_up, d_y, gate, up});
  const auto loss = [&] {
    run(stream_, SwigluForward{y, gate, up});
    return weighted_sum(y, d_y);
  };
  EXPECT_GRADIENT(gate, d_gate, loss);
  EXPECT_GRADIENT(up, d_up, loss);
}

TEST_F(Swiglu, FloatGradientsMatchDoubleAlsoInPlace) {
  const Shape shape{37, 53};
  const Tensor gate = normal(DType::f32, shape, 1, 3.0);
  const Tensor up = normal(DType::f32, shape, 2);
  const Tensor d_y = normal(DType::f32, shape, 3);
  const Tensor want_gate = empty(DType::f64, shape);
  const Tensor want_up = empty(DType::f64, shape);
  run(stream_, SwigluBackward{want_gate, want_up, doubles(d_y), doubles(gate), doubles(up)});
  const Tensor d_gate = empty(DType::f32, shape);
  const Tensor d_up = empty(DType::f32, shape);
  run(stream_, SwigluBackward{d_gate, d_up, d_y, gate, up});
  EXPECT_CLOSE(d_gate, want_gate, 5e-7);
  EXPECT_CLOSE(d_up, want_up, 5e-7);
  const Tensor first = normal(DType::f32, shape, 3);
  const Tensor other = empty(DType::f32, shape);
  run(stream_, SwigluBackward{first, other, first, gate, up});
  EXPECT_SAME_BITS(first, d_gate);
  EXPECT_SAME_BITS(other, d_up);
  run(stream_, SwigluBackward{other, d_y, d_y, gate, up});
  EXPECT_SAME_BITS(other, d_gate);
  EXPECT_SAME_BITS(d_y, d_up);
}

TEST_F(Swiglu, RefusesWrongShapes) {
  const Tensor a = empty(DType::f32, {2, 3});
  const Tensor b = empty(DType::f32, {3, 2});
  EXPECT_THROW(run(stream_, SwigluForward{a, a, b}), Error);
  EXPECT_THROW(run(stream_, SwigluBackward{a, b, a, a, a}), Error);
}

}  // namespace

}  // namespace bifocal::test
