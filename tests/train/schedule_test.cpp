// Learning rates: warm-up, plateau and the end of the cosine.
#include "train/schedule.h"

#include <cmath>

#include <gtest/gtest.h>

namespace bifocal {

namespace {

StageConfig stage(const std::string& schedule, double warmup) {
  return {.rate = 1e-2, .final_rate = 1e-5, .schedule = schedule, .warmup = warmup};
}

TEST(Schedule, WarmUpIsLinearAndReachesTheRate) {
  for (const char* schedule : {"constant", "cosine"}) {
    for (std::int64_t step = 0; step < 10; ++step) {
      EXPECT_DOUBLE_EQ(schedule_factor(stage(schedule, 0.1), 100, step),
                       0.1 * static_cast<double>(step + 1));
    }
  }
}

TEST(Schedule, ConstantStays) {
  for (std::int64_t step = 5; step < 100; ++step) {
    EXPECT_EQ(schedule_factor(stage("constant", 0.05), 100, step), 1.0);
  }
}

TEST(Schedule, CosineFallsToTheFinalRateAtTheLastStep) {
  const StageConfig cosine = stage("cosine", 0.05);
  double before = 1.0;
  for (std::int64_t step = 5; step < 100; ++step) {
    const double factor = schedule_factor(cosine, 100, step);
    EXPECT_LT(factor, before);
    before = factor;
  }
  // Exact but for the rounding of cos(pi).
  EXPECT_NEAR(before * cosine.rate, cosine.final_rate, 1e-17);
  // Halfway between warm-up and end, halfway between the rates.
  EXPECT_NEAR(schedule_factor(stage("cosine", 0.0), 100, 49), 0.5 * (1.0 + 1e-3), 1e-15);
}

TEST(Schedule, HoldsForStagesOfAFewSteps) {
  EXPECT_EQ(schedule_factor(stage("constant", 0.05), 1, 0), 1.0);
  EXPECT_NEAR(schedule_factor(stage("cosine", 0.05), 1, 0), 1e-3, 1e-15);
  for (const double warmup : {0.0, 0.5, 1.0}) {
    for (std::int64_t steps = 1; steps < 5; ++steps) {
      for (std::int64_t step = 0; step < steps; ++step) {
        const double factor = schedule_factor(stage("cosine", warmup), steps, step);
        EXPECT_TRUE(std::isfinite(factor));
        EXPECT_GT(factor, 0.0);
        EXPECT_LE(factor, 1.0);
      }
    }
  }
}

TEST(Schedule, ARateOfZeroStaysFinite) {
  StageConfig zero = stage("cosine", 0.0);
  zero.rate = 0.0;
  for (std::int64_t step = 0; step < 4; ++step) {
    EXPECT_TRUE(std::isfinite(schedule_factor(zero, 4, step)));
  }
}

}  // namespace

}  // namespace bifocal
