// Confidence intervals of rates over problems, and of differences of two rates over the same ones.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace bifocal {

struct Interval {
  double low = 0.0;
  double high = 0.0;
};

struct BootstrapIntervals {
  std::vector<Interval> means;        // [sets]
  std::vector<Interval> differences;  // [sets - 1]: mean of set k + 1 minus mean of set 0
};

// Paired percentile bootstrap: draws problems with replacement, the same for every set, and takes
// the 2.5 and 97.5 percentiles of the means (between order statistics linearly, as numpy's
// default). values: per set, [problems], all of one length of at least 1. Draws depend on (seed,
// stream) alone.
BootstrapIntervals paired_bootstrap(std::span<const std::vector<double>> values,
                                    std::int64_t resamples,
                                    std::uint64_t seed,
                                    std::string_view stream);

// The q-quantile, 0 <= q <= 1, of values, which it reorders. Linear between order statistics.
double quantile(std::vector<double>& values, double q);

}  // namespace bifocal
