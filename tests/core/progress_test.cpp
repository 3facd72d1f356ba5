// Where a process stands, in words.
#include "core/progress.h"

#include <gtest/gtest.h>

namespace bifocal {
namespace {

TEST(Progress, CountsWhatBeginsAndDescribesIt) {
  Progress progress;
  EXPECT_EQ(progress.state(), ProgressState{});
  EXPECT_EQ(describe(progress.state()), "start");
  progress.phase("loading the teacher");
  EXPECT_EQ(describe(progress.state()), "loading the teacher");
  progress.step("distill", 12);
  EXPECT_EQ(describe(progress.state()), "step 12 of distill");
  progress.phase("student forward");
  EXPECT_EQ(describe(progress.state()), "step 12 of distill, student forward");
  EXPECT_EQ(progress.state().marks, 3U);
}

}  // namespace
}  // namespace bifocal
