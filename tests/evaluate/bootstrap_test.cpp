// Intervals against numpy's on sets of the size of a real comparison, and exact properties.
#include "evaluate/bootstrap.h"

#include <cmath>
#include <fstream>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "evaluate/compare.h"

namespace bifocal {
namespace {

TEST(Quantile, IsLinearBetweenOrderStatistics) {
  std::vector<double> values{4.0, 1.0, 3.0, 2.0};
  EXPECT_EQ(quantile(values, 0.0), 1.0);
  EXPECT_EQ(quantile(values, 1.0), 4.0);
  EXPECT_EQ(quantile(values, 0.5), 2.5);
  EXPECT_DOUBLE_EQ(quantile(values, 0.25), 1.75);
  std::vector<double> one{7.0};
  EXPECT_EQ(quantile(one, 0.975), 7.0);
}

TEST(PairedBootstrap, SameSeedSameBitsOtherSeedOtherBits) {
  std::vector<std::vector<double>> sets(2);
  for (int i = 0; i < 50; ++i) {
    sets[0].push_back(std::fmod(i * 0.37, 1.0));
    sets[1].push_back(std::fmod(i * 0.61, 1.0));
  }
  const BootstrapIntervals a = paired_bootstrap(sets, 2000, 1, "all");
  const BootstrapIntervals b = paired_bootstrap(sets, 2000, 1, "all");
  EXPECT_EQ(a.means[1].low, b.means[1].low);
  EXPECT_EQ(a.differences[0].high, b.differences[0].high);
  EXPECT_NE(a.means[1].low, paired_bootstrap(sets, 2000, 2, "all").means[1].low);
  EXPECT_NE(a.means[1].low, paired_bootstrap(sets, 2000, 1, "long").means[1].low);
}

TEST(PairedBootstrap, IsPaired) {
  // Sets that differ by the same amount everywhere: the difference has no spread, the means have.
  const std::vector<std::vector<double>> sets{{0.0, 0.25, 0.5, 0.0}, {0.5, 0.75, 1.0, 0.5}};
  const BootstrapIntervals intervals = paired_bootstrap(sets, 1000, 3, "all");
  EXPECT_EQ(intervals.differences[0].low, 0.5);
  EXPECT_EQ(intervals.differences[0].high, 0.5);
  EXPECT_LT(intervals.means[0].low, intervals.means[0].high);
}

TEST(PairedBootstrap, OneProblemHasNoSpread) {
  const std::vector<std::vector<double>> sets{{0.25}, {0.5}, {1.0}};
  const BootstrapIntervals intervals = paired_bootstrap(sets, 10, 0, "all");
  ASSERT_EQ(intervals.means.size(), 3U);
  ASSERT_EQ(intervals.differences.size(), 2U);
  EXPECT_EQ(intervals.means[0].low, 0.25);
  EXPECT_EQ(intervals.differences[1].high, 0.75);
}

// A p-quantile of R draws has the standard error sqrt(p (1 - p) / R) / density. Near the 2.5 and
// 97.5 percentiles of a bell curve that is 0.0189 standard deviations for R = 20,000; numpy's
// million adds a fiftieth of the variance. 4.5 errors on each of 12 numbers fail by chance once in
// 12,000 seeds, and the seed is fixed. Means are multiples of 1 / (16 problems), which adds a step.
TEST(PairedBootstrap, AgreesWithNumpy) {
  std::ifstream file(BIFOCAL_SOURCE_DIR "/tests/evaluate/reference/bootstrap_sets.json");
  const nlohmann::json reference = nlohmann::json::parse(file);
  std::vector<GradedSet> sets{{.name = "window", .graders = {"exact"}},
                              {.name = "state", .graders = {"exact"}}};
  for (const nlohmann::json& problem : reference["problems"]) {
    for (std::size_t s = 0; s < sets.size(); ++s) {
      const auto correct = problem["sets"][s]["correct"].get<std::string>();
      for (std::size_t k = 0; k < correct.size(); ++k) {
        sets[s].samples.push_back({.id = problem["id"].get<std::string>(),
                                   .sample = static_cast<std::int64_t>(k),
                                   .tokens = problem["sets"][s]["tokens"][k].get<std::int64_t>(),
                                   .stopped = true,
                                   .verdicts = {{.correct = correct[k] == '1'}}});
      }
    }
  }
  const Comparison comparison = compare_sets(sets, {});
  ASSERT_EQ(comparison.by_length.size(), 2U);
  const GroupComparison& longs = comparison.by_length[1];
  EXPECT_EQ(comparison.all.problems, 120);
  EXPECT_EQ(longs.problems, 96);
  const auto check = [](const GroupComparison& group, const nlohmann::json& expected) {
    const std::vector<Estimate> ours{group.rates[0], group.rates[1], group.differences[0]};
    for (std::size_t i = 0; i < ours.size(); ++i) {
      const nlohmann::json& numpy = expected[i];
      const double error = 0.0189 * std::sqrt(1.0 + 1.0 / 50.0) * numpy["deviation"].get<double>();
      const double tolerance = 4.5 * error + 1.0 / (16.0 * static_cast<double>(group.problems));
      EXPECT_NEAR(ours[i].value, numpy["value"].get<double>(), 1e-12) << i;
      EXPECT_NEAR(ours[i].interval.low, numpy["low"].get<double>(), tolerance) << i;
      EXPECT_NEAR(ours[i].interval.high, numpy["high"].get<double>(), tolerance) << i;
    }
  };
  check(comparison.all, reference["expected"]["all"]);
  check(longs, reference["expected"]["long"]);
}

}  // namespace
}  // namespace bifocal
