// Two jobs in one run directory.
#include <memory>

#include <gtest/gtest.h>

#include "core/file.h"
#include "core/process.h"
#include "support/error_of.h"
#include "support/mpi_world.h"
#include "support/shared_directory.h"
#include "train/run_lock.h"

namespace bifocal::test {

namespace {

TEST(RunLock, ASecondJobIsRefusedOnEveryRankWithItsHolder) {
  const SharedDirectory directory;
  const RunLock first(directory.path(), test_world(), 0.0);
  const std::string holder = read_file(directory.path() / "run.lock");
  EXPECT_NE(holder.find("on " + host_name()), std::string::npos) << holder;
  const std::string error = error_of([&] { RunLock(directory.path(), test_world(), 0.2); });
  EXPECT_NE(error.find(holder), std::string::npos) << error;
  EXPECT_NE(error.find(directory.path().string()), std::string::npos) << error;
  for (const std::string& theirs : gather_texts(test_world(), error)) {
    EXPECT_EQ(theirs, error);
  }
}

TEST(RunLock, IsGivenBack) {
  const SharedDirectory directory;
  for (int job = 0; job < 3; ++job) {
    RunLock(directory.path(), test_world(), 5.0);
  }
}

// Of a job whose rank 0 is gone already.
TEST(RunLock, OneRankThatLivesOnIsEnough) {
  const SharedDirectory directory;
  auto job = std::make_unique<RunLock>(directory.path(), test_world(), 0.0);
  if (test_world().rank() + 1 < test_world().size()) {
    job.reset();
  }
  test_world().barrier();
  EXPECT_NE(error_of([&] { RunLock(directory.path(), test_world(), 0.0); }), "");
  job.reset();
  test_world().barrier();
  EXPECT_NO_THROW(RunLock(directory.path(), test_world(), 5.0));
}

TEST(RunLock, ADirectoryThatIsNotThereIsTheSameErrorOnEveryRank) {
  const SharedDirectory directory;
  const std::string error = error_of([&] { RunLock(directory.path() / "absent", test_world()); });
  EXPECT_NE(error.find("run.lock"), std::string::npos) << error;
}

}  // namespace

}  // namespace bifocal::test
