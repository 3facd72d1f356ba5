// Saves beside other work: who waits for whom, and errors of writer threads.
#include <csignal>
#include <fstream>
#include <optional>
#include <sys/resource.h>
#include <thread>

#include <gtest/gtest.h>

#include "checkpoint/checkpoint_fixture.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/step_directory.h"
#include "core/hdf5_handle.h"
#include "parallel/shard.h"
#include "support/error_of.h"
#include "support/mpi_world.h"
#include "support/shared_directory.h"

namespace bifocal::test {

namespace {

namespace fs = std::filesystem;

bool is_last() {
  return test_world().rank() + 1 == test_world().size();
}

Holdings mine(std::uint64_t seed) {
  Holdings held;
  for (const KnownTensor& tensor : known_tensors()) {
    const ShardRange range =
        shard_range(tensor.shape.size(), test_world().size(), test_world().rank());
    held.add(tensor, range.begin, range.end, seed);
  }
  return held;
}

std::int64_t wrong_in(const fs::path& directory, std::int64_t step, std::uint64_t seed) {
  Holdings held;
  for (const KnownTensor& tensor : known_tensors()) {
    held.add_empty(tensor, 0, tensor.shape.size());
  }
  load_checkpoint(step_path(directory, step), held.tensors(), test_world());
  return held.wrong(seed);
}

// No file of this rank can be longer while it lives.
class SmallDisk {
 public:
  explicit SmallDisk(bool is_small) {
    getrlimit(RLIMIT_FSIZE, &before_);
    rlimit small = before_;
    small.rlim_cur = is_small ? 3000 : before_.rlim_cur;
    setrlimit(RLIMIT_FSIZE, &small);
  }

  ~SmallDisk() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int) = std::signal(SIGXFSZ, SIG_IGN);
};

TEST(CheckpointWriter, NobodyWaitsForASlowRanksFile) {
  const SharedDirectory directory;
  CheckpointWriter writer(directory.path(), {}, test_world());
  Holdings held = mine(3);
  {
    std::optional<Hdf5Lock> stalls;  // the last rank's writer cannot go on
    if (is_last()) {
      stalls.emplace();
    }
    writer.start(known_info(4), held.tensors());
    for (int step = 0; step < 20; ++step) {
      EXPECT_FALSE(writer.poll().has_value());
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    EXPECT_TRUE(writer.is_pending());
    EXPECT_EQ(latest_checkpoint(directory.path()), std::nullopt);
    test_world().barrier();
  }
  const std::optional<SaveReport> report = writer.finish();
  ASSERT_TRUE(report.has_value());
  EXPECT_FALSE(writer.is_pending());
  EXPECT_EQ(report->step, 4);
  EXPECT_GE(report->seconds, 0.04);
  std::int64_t bytes = 0;
  for (int rank = 0; rank < test_world().size(); ++rank) {
    bytes += static_cast<std::int64_t>(
        fs::file_size(step_path(directory.path(), 4) / fmt::format("rank_{:05}.h5", rank)));
  }
  EXPECT_EQ(report->bytes, bytes);
  EXPECT_EQ(wrong_in(directory.path(), 4, 3), 0);
}

TEST(CheckpointWriter, PollsFindTheEndByThemselves) {
  const SharedDirectory directory;
  CheckpointWriter writer(directory.path(), {}, test_world());
  EXPECT_FALSE(writer.poll().has_value());
  EXPECT_FALSE(writer.finish().has_value());
  for (const std::int64_t step : {1, 2}) {
    Holdings held = mine(static_cast<std::uint64_t>(step));
    writer.start(known_info(step), held.tensors());
    std::optional<SaveReport> report;
    while (!report.has_value()) {
      report = writer.poll();
    }
    EXPECT_EQ(report->step, step);
    EXPECT_EQ(latest_checkpoint(directory.path()), step_path(directory.path(), step));
    EXPECT_EQ(wrong_in(directory.path(), step, static_cast<std::uint64_t>(step)), 0);
  }
}

TEST(CheckpointWriter, AFullDiskOfOneThreadIsTheSameErrorOnEveryRank) {
  const SharedDirectory directory;
  CheckpointWriter writer(directory.path(), {.newest = 1}, test_world());
  Holdings held = mine(5);
  writer.start(known_info(1), held.tensors());
  writer.finish();
  for (const bool waits : {false, true}) {
    std::string error;
    {
      const SmallDisk disk(is_last());
      writer.start(known_info(2), held.tensors());
      error = error_of([&] {
        while (writer.is_pending()) {
          waits ? writer.finish() : writer.poll();
        }
      });
    }
    EXPECT_NE(error.find("HDF5"), std::string::npos) << error;
    for (const std::string& theirs : gather_texts(test_world(), error)) {
      EXPECT_EQ(theirs, error);
    }
    EXPECT_FALSE(writer.is_pending());
    test_world().barrier();
    EXPECT_FALSE(fs::exists(unfinished_path(directory.path(), 2)));
    EXPECT_EQ(wrong_in(directory.path(), 1, 5), 0);
  }
  writer.start(known_info(2), held.tensors());
  EXPECT_TRUE(writer.finish().has_value());
  EXPECT_EQ(wrong_in(directory.path(), 2, 5), 0);
}

// As when an error elsewhere ends a run in the middle of a save.
TEST(CheckpointWriter, OneThatIsGivenUpLeavesNoCheckpoint) {
  const SharedDirectory directory;
  Holdings held = mine(6);
  save_checkpoint(directory.path(), known_info(1), held.tensors(), {}, test_world());
  {
    CheckpointWriter writer(directory.path(), {}, test_world());
    writer.start(known_info(2), held.tensors());
  }
  test_world().barrier();
  EXPECT_EQ(latest_checkpoint(directory.path()), step_path(directory.path(), 1));
  test_world().barrier();
  save_checkpoint(directory.path(), known_info(2), held.tensors(), {}, test_world());
  EXPECT_EQ(wrong_in(directory.path(), 2, 6), 0);
}

}  // namespace

}  // namespace bifocal::test
