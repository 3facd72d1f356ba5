// Deterministic reductions.
#include "ops/reduce.h"

#include "support/op_test.h"

namespace bifocal::test {

namespace {

class Reduce : public OpTest {
 protected:
  double squares(const ConstTensorView& x) {
    const Tensor sum = zeros(DType::f64, {1});
    run(stream_, SumOfSquares{sum, x});
    return *sum.as<double>();
  }
};

TEST_F(Reduce, MatchesASumInDoubleAndAdds) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const std::int64_t size : {0, 1, 17, 4095, 4096, 4097, 50000}) {
      const Tensor x = normal(dtype, {size}, 1);
      const Tensor sum = zeros(DType::f64, {1});
      *sum.as<double>() = 3.0;
      run(stream_, SumOfSquares{sum, x});
      double want = 3.0;
      for (const double value : to_doubles(x)) {
        want += value * value;
      }
      EXPECT_NEAR(*sum.as<double>(), want, 1e-13 * want);
    }
  }
}

TEST_F(Reduce, HasTheSameBitsForAnyNumberOfThreads) {
  const Tensor x = normal(DType::f32, {50, 2001}, 1);
  double want = 0.0;
  with_threads(1, [&] { want = squares(x); });
  for (const int threads : {2, 3, 7}) {
    with_threads(threads, [&] { EXPECT_EQ(squares(x), want); });
  }
}

TEST_F(Reduce, ShowsNanAndInfinity) {
  const Tensor x = normal(DType::f32, {9000}, 1);
  x.as<float>()[8000] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::isinf(squares(x)));
  x.as<float>()[100] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(squares(x)));
}

TEST_F(Reduce, HoldsSquaresBeyondFloat) {
  const Tensor x = tensor_of<float>(memory_, {1e30F, 1e30F});
  EXPECT_DOUBLE_EQ(squares(x), 2.0 * static_cast<double>(1e30F) * static_cast<double>(1e30F));
}

TEST_F(Reduce, SumsWhatIsKeptAndNothingElse) {
  const Tensor x =
      tensor_of<double>(memory_, {1.5, std::numeric_limits<double>::quiet_NaN(), -0.25, 8.0});
  const Tensor keep = tensor_of<std::uint8_t>(memory_, {1, 0, 1, 0});
  const Tensor sum = tensor_of<double>(memory_, {10.0});
  run(stream_, KeptSum{.sum = sum, .x = x, .keep = keep});
  EXPECT_EQ(sum.as<double>()[0], 11.25);
  EXPECT_THROW(run(stream_, KeptSum{.sum = sum, .x = x, .keep = keep.rows(0, 3)}), Error);
}

TEST_F(Reduce, RefusesAFloatSum) {
  const Tensor x = normal(DType::f32, {4}, 1);
  EXPECT_THROW(run(stream_, SumOfSquares{zeros(DType::f32, {1}), x}), Error);
}

}  // namespace

}  // namespace bifocal::test
