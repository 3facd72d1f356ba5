// Finite differences in double against an analytic gradient.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "core/random.h"
#include "core/tensor.h"
#include "support/compare.h"

namespace bifocal::test {

// d loss / d x[index] of a float64 tensor that `loss` reads, by fourth-order central differences:
// truncation is of order step^4, rounding of order 1e-16 / step.
inline double finite_difference(const TensorView& x,
                                std::int64_t index,
                                const std::function<double()>& loss,
                                double step) {
  double& element = x.as<double>()[index];
  const double kept = element;
  const auto at = [&](double offset) {
    element = kept + offset;
    return loss();
  };
  const double slope =
      (8.0 * (at(step) - at(-step)) - (at(2.0 * step) - at(-2.0 * step))) / (12.0 * step);
  element = kept;
  return slope;
}

// Compares `gradient` (float64, shape of x) with finite differences of `loss` at up to
// `max_elements` elements of x, drawn with a fixed seed. bound is relative to the largest element
// of the gradient, or absolute where that is below 1.
inline testing::AssertionResult gradient_matches(const TensorView& x,
                                                 const ConstTensorView& gradient,
                                                 const std::function<double()>& loss,
                                                 double bound = 1e-9,
                                                 std::int64_t max_elements = 64,
                                                 double step = 1e-3) {
  const std::vector<double> all = to_doubles(gradient);
  double scale = 1.0;
  for (const double value : all) {
    scale = std::max(scale, std::abs(value));
  }
  std::vector<double> got;
  std::vector<double> want;
  const std::int64_t count = std::min(x.size(), max_elements);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t index =
        count == x.size()
            ? i
            : static_cast<std::int64_t>(random_below(
                  static_cast<std::uint64_t>(x.size()), 7, 0, static_cast<std::uint64_t>(i)));
    got.push_back(all[static_cast<std::size_t>(index)]);
    want.push_back(finite_difference(x, index, loss, step));
  }
  return is_within(got, want, bound * scale);
}

// sum of x * y: turns a tensor output into a scalar whose gradient is y.
inline double weighted_sum(const ConstTensorView& x, const ConstTensorView& y) {
  const std::vector<double> a = to_doubles(x);
  const std::vector<double> b = to_doubles(y);
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    sum += a[i] * b[i];
  }
  return sum;
}

}  // namespace bifocal::test

#define EXPECT_GRADIENT(...) EXPECT_TRUE(::bifocal::test::gradient_matches(__VA_ARGS__))
