// Elementary functions and the dealing of rows.
#include "ops/vector_math.h"

#include "support/op_test.h"

namespace bifocal::test {

namespace {

TEST(VectorMath, FloatExponentialIsWithinTwoUlp) {
  double worst = 0.0;
  for (int i = -87336; i <= 88722; ++i) {
    const float x = static_cast<float>(i) * 1e-3F;
    const double want = std::exp(static_cast<double>(x));
    const double ulp = std::ldexp(1.0, std::ilogb(want) - 23);
    worst = std::max(worst, std::abs(static_cast<double>(fast_exp(x)) - want) / ulp);
  }
  EXPECT_LT(worst, 2.0);
}

TEST(VectorMath, FloatExponentialOfLimits) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(fast_exp(0.0F), 1.0F);
  EXPECT_EQ(fast_exp(-0.0F), 1.0F);
  EXPECT_EQ(fast_exp(-kInfinity), 0.0F);
  EXPECT_EQ(fast_exp(-1e30F), 0.0F);
  EXPECT_EQ(fast_exp(-87.34F), 0.0F);
  EXPECT_GT(fast_exp(-87.33F), 0.0F);
  EXPECT_LT(fast_exp(88.72F), kInfinity);
  EXPECT_EQ(fast_exp(88.73F), kInfinity);
  EXPECT_EQ(fast_exp(kInfinity), kInfinity);
  EXPECT_TRUE(std::isnan(fast_exp(std::numeric_limits<float>::quiet_NaN())));
}

TEST(VectorMath, SigmoidsHoldInBothTails) {
  EXPECT_EQ(sigmoid(0.0F), 0.5F);
  EXPECT_EQ(sigmoid(1000.0F), 1.0F);
  EXPECT_EQ(sigmoid(-1000.0F), 0.0F);
  EXPECT_EQ(log_sigmoid(1000.0), 0.0);
  EXPECT_EQ(log_sigmoid(-1000.0), -1000.0);
  EXPECT_DOUBLE_EQ(log_sigmoid(0.3), std::log(1.0 / (1.0 + std::exp(-0.3))));
}

// Whether a row lies at an odd address must not move its bits: rows are compared with each other.
TEST(VectorMath, RowSumsDoNotDependOnAlignment) {
  for (const std::int64_t size : {1, 7, 33, 100, 1023}) {
    std::vector<float> a(static_cast<std::size_t>(size));
    for (std::size_t i = 0; i < a.size(); ++i) {
      a[i] = static_cast<float>(random_normal(1, 2, i));
    }
    std::vector<float> y(a.size());
    const float want_dot = dot(a.data(), a.data(), size);
    const float want_sum = exp_row(y.data(), a.data(), 1.0F, size);
    for (std::size_t offset = 1; offset < 9; ++offset) {
      std::vector<float> moved(a.size() + offset);
      std::copy(a.begin(), a.end(), moved.begin() + static_cast<std::ptrdiff_t>(offset));
      EXPECT_EQ(dot(moved.data() + offset, a.data(), size), want_dot);
      EXPECT_EQ(exp_row(y.data(), moved.data() + offset, 1.0F, size), want_sum);
    }
  }
}

TEST(VectorMath, SoftmaxRowSumsToOne) {
  std::vector<double> x = {1.0, -std::numeric_limits<double>::infinity(), 3.0, 800.0};
  const double lse = softmax_row(x.data(), x.data(), 4);
  EXPECT_DOUBLE_EQ(lse, 800.0);
  EXPECT_DOUBLE_EQ(row_sum(x.data(), 4), 1.0);
  EXPECT_EQ(x[1], 0.0);
  EXPECT_EQ(row_max(x.data(), 0), -std::numeric_limits<double>::infinity());
}

TEST(VectorMath, RangesCoverEveryIndexOnce) {
  for (const std::int64_t count : {0, 1, 5, 64, 100, 1000}) {
    for (const std::int64_t grain : {1, 16, 64}) {
      for (const int threads : {1, 2, 3, 7}) {
        std::vector<int> seen(static_cast<std::size_t>(count), 0);
        with_threads(threads, [&] {
          parallel_ranges(count, grain, 1000000, [&](std::int64_t begin, std::int64_t end) {
            EXPECT_EQ(begin % grain, 0);
            for (std::int64_t i = begin; i < end; ++i) {
              ++seen[static_cast<std::size_t>(i)];
            }
          });
        });
        EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), count);
      }
    }
  }
}

}  // namespace

}  // namespace bifocal::test
