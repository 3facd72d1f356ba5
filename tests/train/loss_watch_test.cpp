// Which losses are called spikes.
#include "train/loss_watch.h"

#include <cmath>

#include <gtest/gtest.h>

namespace bifocal {
namespace {

// Mean 2, deviation 0.1.
double calm(int step) {
  return step % 2 == 0 ? 1.9 : 2.1;
}

TEST(LossWatch, CallsWhatLiesFourDeviationsAboveASpike) {
  LossWatch watch;
  for (int step = 0; step < 40; ++step) {
    EXPECT_FALSE(watch.is_spike(calm(step))) << step;
  }
  EXPECT_NEAR(watch.mean(), 2.0, 1e-12);
  EXPECT_NEAR(watch.deviation(), 0.1, 1e-12);
  EXPECT_FALSE(watch.is_spike(2.39));
  EXPECT_TRUE(watch.is_spike(2.5));
  EXPECT_FALSE(watch.is_spike(0.1));  // far below is no harm
}

TEST(LossWatch, SaysNothingBeforeItHasSeenEnough) {
  LossWatch watch;
  for (std::size_t step = 0; step + 1 < LossWatch::kLeast; ++step) {
    watch.is_spike(calm(static_cast<int>(step)));
  }
  EXPECT_FALSE(watch.is_spike(100.0));
}

TEST(LossWatch, AWindowForgetsAndAResetForgetsAll) {
  LossWatch watch;
  watch.is_spike(1000.0);
  for (std::size_t step = 0; step < LossWatch::kWindow; ++step) {
    watch.is_spike(calm(static_cast<int>(step)));
  }
  EXPECT_NEAR(watch.mean(), 2.0, 1e-12);
  watch.reset();
  EXPECT_EQ(watch.mean(), 0.0);
  EXPECT_FALSE(watch.is_spike(1000.0));
}

}  // namespace
}  // namespace bifocal
