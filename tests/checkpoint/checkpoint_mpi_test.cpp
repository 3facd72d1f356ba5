// Checkpoints of several ranks: other cuts and groups, and errors of one rank.
#include <csignal>
#include <fstream>
#include <optional>
#include <sys/resource.h>

#include <gtest/gtest.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_fixture.h"
#include "checkpoint/manifest.h"
#include "core/file.h"
#include "parallel/shard.h"
#include "support/mpi_world.h"
#include "support/temporary_directory.h"

namespace bifocal {

namespace {

namespace fs = std::filesystem;

enum class Values { known, unset };

// What one of `group`'s ranks holds of each tensor cut into `pieces`, dealt in turn.
Holdings dealt(const Communicator& group, int pieces, Values values, std::uint64_t seed) {
  Holdings held;
  for (const KnownTensor& tensor : known_tensors()) {
    for (int piece = 0; piece < pieces; ++piece) {
      const ShardRange range = shard_range(tensor.shape.size(), pieces, piece);
      if (piece % group.size() == group.rank()) {
        if (values == Values::known) {
          held.add(tensor, range.begin, range.end, seed);
        } else {
          held.add_empty(tensor, range.begin, range.end);
        }
      }
    }
  }
  return held;
}

class CheckpointOnRanks : public ::testing::Test {
 protected:
  void SetUp() override {
    if (world.rank() == 0) {
      scratch.emplace();
    }
    directory = broadcast_text(world, scratch.has_value() ? scratch->path() : "", 0);
  }

  void TearDown() override {
    world.barrier();
    scratch.reset();
  }

  void save(std::int64_t step, int pieces, std::uint64_t seed) {
    save_checkpoint(directory,
                    known_info(step),
                    dealt(world, pieces, Values::known, seed).tensors(),
                    {},
                    world);
  }

  std::int64_t load(std::int64_t step, int pieces, std::uint64_t seed, Communicator& group) {
    Holdings held = dealt(group, pieces, Values::unset, seed);
    load_checkpoint(directory / ("step_" + std::to_string(step)), held.tensors(), group);
    return held.wrong(seed);
  }

  // Expects that `work` throws the same Error on every rank, and returns its text.
  template <class Work>
  std::string common_error(Work work) {
    std::string text;
    try {
      work();
    } catch (const Error& error) {
      text = error.what();
    }
    EXPECT_NE(text, "") << "no error";
    for (const std::string& theirs : gather_texts(world, text)) {
      EXPECT_EQ(theirs, text);
    }
    return text;
  }

  Communicator& world = test_world();
  fs::path directory;
  std::optional<test::TemporaryDirectory> scratch;
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_F(CheckpointOnRanks, LoadsUnderAnyCutAndAnyNumberOfRanks) {
  for (const int saved : {1, 4, 7}) {
    save(saved, saved, 3);
    EXPECT_EQ(read_manifest(directory / ("step_" + std::to_string(saved))).ranks, world.size());
    for (int ranks = 1; ranks <= world.size(); ++ranks) {
      const auto group = world.split(world.rank() < ranks ? 0 : 1);
      if (world.rank() < ranks) {
        for (const int loaded : {1, 3, 8}) {
          EXPECT_EQ(load(saved, loaded, 3, *group), 0)
              << saved << " pieces, " << ranks << " ranks, " << loaded << " pieces";
        }
      }
    }
  }
}

TEST_F(CheckpointOnRanks, EveryRankMayLoadTheWhole) {
  save(1, 4, 3);
  Holdings held;
  for (const KnownTensor& tensor : known_tensors()) {
    held.add_empty(tensor, 0, tensor.shape.size());
  }
  load_checkpoint(directory / "step_1", held.tensors(), world);
  EXPECT_EQ(held.wrong(3), 0);
}

TEST_F(CheckpointOnRanks, WhatOneRankCannotSaveIsTheSameErrorOnEvery) {
  save(1, 4, 3);
  const int last = world.size() - 1;
  const std::string text = common_error([&] {
    Holdings held = dealt(world, world.size(), Values::known, 4);
    if (world.rank() == last) {
      held.tensors()[0].data.dtype = DType::i32;
    }
    save_checkpoint(directory, known_info(2), held.tensors(), {}, world);
  });
  EXPECT_TRUE(contains(text, "int32")) << text;
  EXPECT_TRUE(world.size() == 1 || contains(text, "on rank " + std::to_string(last))) << text;
  EXPECT_EQ(latest_checkpoint(directory), directory / "step_1");
  EXPECT_EQ(load(1, 2, 3, world), 0);
}

TEST_F(CheckpointOnRanks, RanksThatDisagreeOnAShapeAreRefused) {
  if (world.size() == 1) {
    return;  // One rank agrees with itself.
  }
  const std::string text = common_error([&] {
    const bool differs = world.rank() == world.size() - 1;
    Holdings held;
    const KnownTensor tensor{"x", DType::f32, differs ? Shape{3, 4} : Shape{12}};
    const ShardRange range = shard_range(12, world.size(), world.rank());
    held.add(tensor, range.begin, range.end, 1);
    save_checkpoint(directory, known_info(2), held.tensors(), {}, world);
  });
  EXPECT_TRUE(contains(text, "[3, 4]") && contains(text, "[12]")) << text;
}

TEST_F(CheckpointOnRanks, ADiskThatFillsUpOnOneRankLeavesEarlierCheckpoints) {
  save(1, 4, 3);
  const std::string text = common_error([&] {
    Holdings held = dealt(world, world.size(), Values::known, 4);
    const KnownTensor large{"large", DType::f32, {world.size(), 50000}};
    const ShardRange mine = shard_range(large.shape.size(), world.size(), world.rank());
    held.add(large, mine.begin, mine.end, 4);
    rlimit before{};
    getrlimit(RLIMIT_FSIZE, &before);
    rlimit small = before;
    small.rlim_cur = 30000;
    const auto handler = std::signal(SIGXFSZ, SIG_IGN);
    if (world.rank() == world.size() - 1) {
      setrlimit(RLIMIT_FSIZE, &small);
    }
    try {
      save_checkpoint(directory, known_info(2), held.tensors(), {.newest = 1}, world);
    } catch (const Error&) {
      setrlimit(RLIMIT_FSIZE, &before);
      std::signal(SIGXFSZ, handler);
      throw;
    }
    setrlimit(RLIMIT_FSIZE, &before);
  });
  EXPECT_TRUE(contains(text, "HDF5")) << text;
  world.barrier();
  EXPECT_FALSE(fs::exists(directory / "step_2"));
  EXPECT_FALSE(fs::exists(directory / "step_2.tmp"));
  EXPECT_EQ(load(1, 3, 3, world), 0);
  world.barrier();
  save(2, 4, 5);
  EXPECT_EQ(load(2, 3, 5, world), 0);
}

TEST_F(CheckpointOnRanks, ADamagedFileIsTheSameErrorOnEvery) {
  save(1, 4, 3);
  char name[32];
  std::snprintf(name, sizeof(name), "rank_%05d.h5", world.size() - 1);
  const fs::path file = directory / "step_1" / name;
  if (world.rank() == 0) {
    std::string bytes = read_file(file);
    bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 4);
    std::ofstream(file, std::ios::binary) << bytes;
  }
  world.barrier();
  EXPECT_TRUE(contains(common_error([&] { load(1, 4, 3, world); }), file.string()));
  world.barrier();
  if (world.rank() == 0) {
    fs::remove(file);
  }
  world.barrier();
  EXPECT_TRUE(contains(common_error([&] { load(1, 4, 3, world); }), file.string()));
}

TEST_F(CheckpointOnRanks, AMissingCheckpointIsTheSameErrorOnEvery) {
  EXPECT_TRUE(contains(common_error([&] { load(99, 4, 3, world); }), "step_99"));
}

}  // namespace bifocal
