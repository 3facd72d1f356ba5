// Phases of a stream.
#include "ops/timer.h"

#include <chrono>
#include <thread>

#include <gtest/gtest.h>

namespace bifocal {
namespace {

void sleep_for_milliseconds(int count) {
  std::this_thread::sleep_for(std::chrono::milliseconds(count));
}

TEST(Timeline, AddsPhasesOfOneNameAndForgetsWhatWasTaken) {
  CpuStream cpu;
  Stream stream{&cpu};
  Timeline timeline(stream);
  timeline.phase("dropped");
  sleep_for_milliseconds(20);
  timeline.clear();
  sleep_for_milliseconds(20);  // of no phase
  timeline.phase("a");
  sleep_for_milliseconds(2);
  timeline.phase("b");
  sleep_for_milliseconds(10);
  timeline.phase("a");
  sleep_for_milliseconds(3);
  const std::map<std::string, double> seconds = timeline.take();
  ASSERT_EQ(seconds.size(), 2U);
  EXPECT_GE(seconds.at("a"), 0.005);  // a sleep is never shorter than asked for
  EXPECT_GE(seconds.at("b"), 0.010);
  EXPECT_TRUE(timeline.take().empty());
}

TEST(StreamClock, HasOneTimeLessThanMarks) {
  CpuStream cpu;
  const std::unique_ptr<StreamClock> clock = make_clock(cpu);
  EXPECT_TRUE(clock->take().empty());
  clock->mark();
  clock->mark();
  sleep_for_milliseconds(1);
  clock->mark();
  const std::vector<double> seconds = clock->take();
  ASSERT_EQ(seconds.size(), 2U);
  EXPECT_GE(seconds[1], 0.001);
  EXPECT_TRUE(clock->take().empty());
}

}  // namespace
}  // namespace bifocal
