// Error measures and tolerance checks. A failure prints the worst element and error quantiles.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/tensor.h"

namespace bifocal::test {

// Elements of a float32 or float64 tensor.
inline std::vector<double> to_doubles(const ConstTensorView& x) {
  std::vector<double> values(static_cast<std::size_t>(x.size()));
  dispatch_real("compare", x.dtype, [&]<class T>(T) {
    std::copy_n(x.as<T>(), values.size(), values.begin());
  });
  return values;
}

inline const std::vector<double>& to_doubles(const std::vector<double>& x) {
  return x;
}

// |got - want| over all elements. A NaN on one side only counts as infinitely wrong, equal
// infinities as right.
struct Difference {
  double largest = 0.0;
  double scale = 0.0;  // max |want| over finite elements
  std::size_t index = 0;
  double got = 0.0, want = 0.0;  // at index
  std::vector<double> errors;    // sorted

  double quantile(double part) const {
    if (errors.empty()) {
      return 0.0;
    }
    return errors[static_cast<std::size_t>(part * static_cast<double>(errors.size() - 1))];
  }

  std::string describe() const {
    return fmt::format(
        "largest error {:.3e} at element {} of {}: got {:.17g}, want {:.17g}; max|want| {:.3e}; "
        "error quantiles 50% {:.2e}, 90% {:.2e}, 99% {:.2e}",
        largest,
        index,
        errors.size(),
        got,
        want,
        scale,
        quantile(0.5),
        quantile(0.9),
        quantile(0.99));
  }
};

inline Difference difference(const std::vector<double>& got, const std::vector<double>& want) {
  Difference result;
  if (got.size() != want.size()) {
    result.largest = std::numeric_limits<double>::infinity();
    result.got = static_cast<double>(got.size());
    result.want = static_cast<double>(want.size());
    return result;
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    double error = std::abs(got[i] - want[i]);
    if (got[i] == want[i] || (std::isnan(got[i]) && std::isnan(want[i]))) {
      error = 0.0;
    } else if (!(error <= std::numeric_limits<double>::max())) {
      error = std::numeric_limits<double>::infinity();
    }
    if (std::isfinite(want[i])) {
      result.scale = std::max(result.scale, std::abs(want[i]));
    }
    if (i == 0 || error > result.largest) {
      result.largest = error;
      result.index = i;
      result.got = got[i];
      result.want = want[i];
    }
    result.errors.push_back(error);
  }
  std::sort(result.errors.begin(), result.errors.end());
  return result;
}

// max |got - want|; infinite for a NaN that is not wanted or unequal sizes.
template <class Got, class Want>
double max_abs_error(const Got& got, const Want& want) {
  return difference(to_doubles(got), to_doubles(want)).largest;
}

// max |got - want| / max |want|; 0 where both are all zero.
template <class Got, class Want>
double scaled_error(const Got& got, const Want& want) {
  const Difference d = difference(to_doubles(got), to_doubles(want));
  return d.largest == 0.0 ? 0.0 : d.largest / d.scale;
}

// max |got - want| <= bound * max |want|.
template <class Got, class Want>
testing::AssertionResult is_close(const Got& got, const Want& want, double bound) {
  const Difference d = difference(to_doubles(got), to_doubles(want));
  if (d.largest <= bound * d.scale) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure()
         << d.describe() << fmt::format("; bound {:.1e} of max|want|", bound);
}

// max |got - want| <= bound.
template <class Got, class Want>
testing::AssertionResult is_within(const Got& got, const Want& want, double bound) {
  const Difference d = difference(to_doubles(got), to_doubles(want));
  if (d.largest <= bound) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << d.describe() << fmt::format("; bound {:.1e}", bound);
}

// Same type, shape and bits.
inline testing::AssertionResult same_bits(const ConstTensorView& got, const ConstTensorView& want) {
  if (got.dtype != want.dtype || !(got.shape == want.shape)) {
    return testing::AssertionFailure()
           << name_of(got.dtype) << ' ' << to_string(got.shape) << " against "
           << name_of(want.dtype) << ' ' << to_string(want.shape);
  }
  if (got.bytes() == 0 || std::memcmp(got.data, want.data, got.bytes()) == 0) {
    return testing::AssertionSuccess();
  }
  if (got.dtype == DType::f32 || got.dtype == DType::f64) {
    return testing::AssertionFailure()
           << "bits differ: " << difference(to_doubles(got), to_doubles(want)).describe();
  }
  return testing::AssertionFailure() << "bits differ";
}

}  // namespace bifocal::test

// Arguments are tensors (float32 or float64) or vectors of double. CLOSE is relative to max|want|,
// WITHIN absolute.
#define EXPECT_CLOSE(got, want, bound) EXPECT_TRUE(::bifocal::test::is_close(got, want, bound))
#define EXPECT_WITHIN(got, want, bound) EXPECT_TRUE(::bifocal::test::is_within(got, want, bound))
#define EXPECT_SAME_BITS(got, want) EXPECT_TRUE(::bifocal::test::same_bits(got, want))
