// Linear products against plain sums in double.
#include "ops/linear.h"

#include "support/op_test.h"

namespace bifocal::test {

namespace {

struct Size {
  std::int64_t rows, in, out;
};

// Block edges of the threads (16) and of BLAS, one, a prime, empty.
const std::vector<Size> kSizes = {{0, 8, 8},
                                  {1, 1, 1},
                                  {1, 64, 300},
                                  {5, 7, 3},
                                  {15, 31, 17},
                                  {16, 16, 16},
                                  {33, 65, 40},
                                  {130, 48, 97},
                                  {40, 0, 5}};

class Linear : public OpTest {
 protected:
  struct Case {
    Tensor x, weight, bias, d_y;
  };

  Case make(DType dtype, Size s) {
    return {normal(dtype, {s.rows, s.in}, 1),
            normal(dtype, {s.out, s.in}, 2),
            normal(dtype, {s.out}, 3),
            normal(dtype, {s.rows, s.out}, 4)};
  }
};

std::vector<double> forward_definition(const ConstTensorView& x,
                                       const ConstTensorView& weight,
                                       const ConstTensorView& bias) {
  const auto a = to_doubles(x);
  const auto w = to_doubles(weight);
  const auto b = to_doubles(bias);
  const auto in = static_cast<std::size_t>(weight.shape[1]);
  std::vector<double> y;
  for (std::size_t row = 0; row < static_cast<std::size_t>(x.shape[0]); ++row) {
    for (std::size_t o = 0; o < b.size(); ++o) {
      double sum = b[o];
      for (std::size_t i = 0; i < in; ++i) {
        sum += a[row * in + i] * w[o * in + i];
      }
      y.push_back(sum);
    }
  }
  return y;
}

// Sums of up to 130 products of unit size in float32: 1e-5 leaves a factor 10 over the worst.
double bound_of(DType dtype) {
  return dtype == DType::f32 ? 1e-5 : 1e-14;
}

TEST_F(Linear, ForwardMatchesDefinition) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const Size s : kSizes) {
      SCOPED_TRACE(fmt::format("{} rows, {} in, {} out", s.rows, s.in, s.out));
      const Case c = make(dtype, s);
      const Tensor y = empty(dtype, {s.rows, s.out});
      run(stream_, LinearForward{y, c.x, c.weight, c.bias});
      EXPECT_CLOSE(y, forward_definition(c.x, c.weight, c.bias), bound_of(dtype));
      const Tensor plain = empty(dtype, {s.rows, s.out});
      run(stream_, LinearForward{plain, c.x, c.weight, {}});
      const Tensor none = zeros(dtype, {s.out});
      EXPECT_CLOSE(plain, forward_definition(c.x, c.weight, none), bound_of(dtype));
    }
  }
}

TEST_F(Linear, GradientsMatchDefinition) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const Size s : kSizes) {
      SCOPED_TRACE(fmt::format("{} rows, {} in, {} out", s.rows, s.in, s.out));
      const Case c = make(dtype, s);
      const Tensor d_x = empty(dtype, {s.rows, s.in});
      const Tensor added_d_x = normal(dtype, {s.rows, s.in}, 5);
      const Tensor d_weight = normal(dtype, {s.out, s.in}, 6);
      const Tensor d_bias = normal(dtype, {s.out}, 7);
      auto want_d_x = std::vector<double>(static_cast<std::size_t>(s.rows * s.in), 0.0);
      auto want_added = to_doubles(added_d_x);
      auto want_d_weight = to_doubles(d_weight);
      auto want_d_bias = to_doubles(d_bias);
      const auto x = to_doubles(c.x);
      const auto w = to_doubles(c.weight);
      const auto g = to_doubles(c.d_y);
      for (std::int64_t row = 0; row < s.rows; ++row) {
        for (std::int64_t o = 0; o < s.out; ++o) {
          const double slope = g[static_cast<std::size_t>(row * s.out + o)];
          want_d_bias[static_cast<std::size_t>(o)] += slope;
          for (std::int64_t i = 0; i < s.in; ++i) {
            const auto at = static_cast<std::size_t>(row * s.in + i);
            const auto at_weight = static_cast<std::size_t>(o * s.in + i);
            want_d_x[at] += slope * w[at_weight];
            want_added[at] += slope * w[at_weight];
            want_d_weight[at_weight] += slope * x[at];
          }
        }
      }
      run(stream_, LinearBackwardInput{d_x, c.d_y, c.weight});
      run(stream_, LinearBackwardInput{added_d_x, c.d_y, c.weight, true});
      run(stream_, LinearBackwardWeight{d_weight, d_bias, c.d_y, c.x});
      EXPECT_CLOSE(d_x, want_d_x, bound_of(dtype));
      EXPECT_CLOSE(added_d_x, want_added, bound_of(dtype));
      EXPECT_CLOSE(d_weight, want_d_weight, bound_of(dtype));
      EXPECT_CLOSE(d_bias, want_d_bias, bound_of(dtype));
    }
  }
}

TEST_F(Linear, GradientsMatchFiniteDifferences) {
  const Case c = make(DType::f64, {6, 5, 7});
  const Tensor y = empty(DType::f64, {6, 7});
  const auto loss = [&] {
    run(stream_, LinearForward{y, c.x, c.weight, c.bias});
    return weighted_sum(y, c.d_y);
  };
  const Tensor d_x = empty(DType::f64, {6, 5});
  const Tensor d_weight = zeros(DType::f64, {7, 5});
  const Tensor d_bias = zeros(DType::f64, {7});
  run(stream_, LinearBackwardInput{d_x, c.d_y, c.weight});
  run(stream_, LinearBackwardWeight{d_weight, d_bias, c.d_y, c.x});
  EXPECT_GRADIENT(c.x, d_x, loss);
  EXPECT_GRADIENT(c.weight, d_weight, loss);
  EXPECT_GRADIENT(c.bias, d_bias, loss);
}

TEST_F(Linear, TwoRunsAndBiasUnderAnyThreadsGiveTheSameBits) {
  const Case c = make(DType::f32, {700, 96, 160});
  const Tensor first = zeros(DType::f32, {160, 96});
  const Tensor second = zeros(DType::f32, {160, 96});
  const Tensor first_bias = zeros(DType::f32, {160});
  const Tensor second_bias = zeros(DType::f32, {160});
  const Tensor single = zeros(DType::f32, {160, 96});
  const Tensor single_bias = zeros(DType::f32, {160});
  with_threads(3, [&] {
    run(stream_, LinearBackwardWeight{first, first_bias, c.d_y, c.x});
    run(stream_, LinearBackwardWeight{second, second_bias, c.d_y, c.x});
  });
  with_threads(1, [&] { run(stream_, LinearBackwardWeight{single, single_bias, c.d_y, c.x}); });
  EXPECT_SAME_BITS(first, second);
  EXPECT_SAME_BITS(first_bias, second_bias);
  EXPECT_SAME_BITS(single_bias, first_bias);
}

TEST_F(Linear, OneRowDoesNotMoveAnother) {
  const Case c = make(DType::f32, {50, 33, 70});
  const Tensor before = empty(DType::f32, {50, 70});
  const Tensor after = empty(DType::f32, {50, 70});
  run(stream_, LinearForward{before, c.x, c.weight, c.bias});
  fill(c.x.rows(20, 21), [](std::int64_t) { return 1e30; });
  run(stream_, LinearForward{after, c.x, c.weight, c.bias});
  EXPECT_SAME_BITS(after.rows(0, 20), before.rows(0, 20));
  EXPECT_SAME_BITS(after.rows(21, 50), before.rows(21, 50));
}

TEST_F(Linear, RefusesWrongShapesAndTypes) {
  const Case c = make(DType::f32, {4, 3, 5});
  const Tensor y = empty(DType::f32, {4, 5});
  const Tensor wrong = empty(DType::f32, {4, 6});
  const Tensor wide = empty(DType::f64, {4, 5});
  EXPECT_THROW(run(stream_, LinearForward{wrong, c.x, c.weight, c.bias}), Error);
  EXPECT_THROW(run(stream_, LinearForward{wide, c.x, c.weight, c.bias}), Error);
  EXPECT_THROW(run(stream_, LinearForward{y, c.d_y, c.weight, c.bias}), Error);
  EXPECT_THROW(run(stream_, LinearForward{y, c.x, c.weight, c.x}), Error);
  EXPECT_THROW(run(stream_, LinearForward{y, c.bias, c.weight, {}}), Error);
  EXPECT_THROW(run(stream_, LinearBackwardInput{wrong, c.d_y, c.weight}), Error);
  EXPECT_THROW(run(stream_, LinearBackwardWeight{wrong, {}, c.d_y, c.x}), Error);
}

}  // namespace

}  // namespace bifocal::test
