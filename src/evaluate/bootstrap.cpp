// The paired percentile bootstrap.
#include "evaluate/bootstrap.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/random.h"

namespace bifocal {

namespace {

constexpr double kTail = 0.025;  // on each side of a 95 % interval

Interval interval_of(std::vector<double>& means) {
  const double low = quantile(means, kTail);
  return {low, quantile(means, 1.0 - kTail)};
}

}  // namespace

double quantile(std::vector<double>& values, double q) {
  BIFOCAL_ASSERT(!values.empty() && q >= 0.0 && q <= 1.0);
  const double place = q * static_cast<double>(values.size() - 1);
  const auto below = values.begin() + static_cast<std::ptrdiff_t>(std::floor(place));
  std::nth_element(values.begin(), below, values.end());
  const double share = place - std::floor(place);
  if (share == 0.0) {
    return *below;
  }
  return *below + share * (*std::min_element(below + 1, values.end()) - *below);
}

BootstrapIntervals paired_bootstrap(std::span<const std::vector<double>> values,
                                    std::int64_t resamples,
                                    std::uint64_t seed,
                                    std::string_view stream) {
  BIFOCAL_ASSERT(!values.empty() && !values[0].empty() && resamples >= 1);
  const std::size_t sets = values.size();
  const std::size_t problems = values[0].size();
  BIFOCAL_ASSERT(std::ranges::all_of(
      values, [&](const std::vector<double>& set) { return set.size() == problems; }));
  const std::uint64_t number = stream_of(stream);
  std::vector<std::vector<double>> means(sets,
                                         std::vector<double>(static_cast<std::size_t>(resamples)));
#pragma omp parallel for schedule(static)
  for (std::int64_t r = 0; r < resamples; ++r) {
    std::vector<double> sums(sets, 0.0);
    for (std::size_t i = 0; i < problems; ++i) {
      const std::uint64_t index = static_cast<std::uint64_t>(r) * problems + i;
      const auto drawn = static_cast<std::size_t>(random_below(problems, seed, number, index));
      for (std::size_t s = 0; s < sets; ++s) {
        sums[s] += values[s][drawn];
      }
    }
    for (std::size_t s = 0; s < sets; ++s) {
      means[s][static_cast<std::size_t>(r)] = sums[s] / static_cast<double>(problems);
    }
  }
  BootstrapIntervals intervals;
  std::vector<double> difference(static_cast<std::size_t>(resamples));
  for (std::size_t s = 1; s < sets; ++s) {
    std::ranges::transform(means[s], means[0], difference.begin(), std::minus<>());
    intervals.differences.push_back(interval_of(difference));
  }
  for (std::vector<double>& set : means) {
    intervals.means.push_back(interval_of(set));
  }
  return intervals;
}

}  // namespace bifocal
