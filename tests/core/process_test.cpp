// Processes that run, have ended, or never were.
#include "core/process.h"

#include <csignal>
#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

namespace bifocal {

namespace {

TEST(Process, ThisOneRuns) {
  const ProcessId self = this_process();
  EXPECT_EQ(self.number, getpid());
  EXPECT_GT(self.start, 0U);
  EXPECT_TRUE(is_running(self));
}

TEST(Process, ANumberUsedAgainIsAnotherProcess) {
  ProcessId other = this_process();
  other.start += 1;
  EXPECT_FALSE(is_running(other));
}

// A child that is killed has ended before its parent collects it, and after.
TEST(Process, AKilledOneHasEnded) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    const ProcessId self = this_process();
    const bool sent = write(ready[1], &self, sizeof self) == sizeof self;
    while (sent) {
      pause();
    }
    _exit(1);
  }
  ASSERT_GT(child, 0);
  ProcessId id;
  ASSERT_EQ(read(ready[0], &id, sizeof id), static_cast<ssize_t>(sizeof id));
  EXPECT_EQ(id.number, child);
  EXPECT_TRUE(is_running(id));
  kill(child, SIGKILL);
  siginfo_t info{};
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  EXPECT_FALSE(is_running(id));
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_FALSE(is_running(id));
  close(ready[0]);
  close(ready[1]);
}

TEST(Process, TheHostHasAName) {
  EXPECT_FALSE(host_name().empty());
}

}  // namespace

}  // namespace bifocal
