// Signals are remembered while somebody asks for them, and what they did before comes back.
#include "train/signals.h"

#include <csignal>

#include <gtest/gtest.h>

namespace bifocal {
namespace {

int seen_before = 0;

void count_one(int /*signal*/) {
  ++seen_before;
}

TEST(StopSignals, AreRememberedInsteadOfEndingTheProcess) {
  const auto self = make_self_communicator();
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1}) {
    const StopSignals signals;
    EXPECT_EQ(signals.agreed(*self), 0);
    std::raise(signal);
    std::raise(signal);  // some launchers deliver twice
    EXPECT_EQ(signals.agreed(*self), signal);
    EXPECT_EQ(signals.agreed(*self), signal);
  }
}

TEST(StopSignals, GiveBackWhatWasThereBefore) {
  std::signal(SIGUSR1, count_one);
  {
    const StopSignals signals;
    std::raise(SIGUSR1);
    EXPECT_EQ(seen_before, 0);
  }
  std::raise(SIGUSR1);
  EXPECT_EQ(seen_before, 1);
  std::signal(SIGUSR1, SIG_DFL);
}

TEST(StopSignals, HaveNames) {
  EXPECT_EQ(name_of_signal(SIGTERM), "SIGTERM");
  EXPECT_EQ(name_of_signal(SIGINT), "SIGINT");
  EXPECT_EQ(name_of_signal(SIGUSR1), "SIGUSR1");
}

}  // namespace
}  // namespace bifocal
