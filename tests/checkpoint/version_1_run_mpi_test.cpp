// The kept checkpoint of a training run on two ranks, of format version 1: every stored value on
// any number of ranks. How it was made: tests/checkpoint/make_version_1_run.sh.
#include <map>
#include <sstream>

#include <gtest/gtest.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "core/file.h"
#include "core/sha256.h"
#include "parallel/shard.h"
#include "support/mpi_world.h"

namespace bifocal {

namespace {

namespace fs = std::filesystem;

const fs::path kRun = fs::path(BIFOCAL_SOURCE_DIR) / "tests/checkpoint/version_1_run/run";
const fs::path kCheckpoint = kRun / "checkpoints/step_4";

// SHA-256 of each tensor's elements, as h5py read them.
std::map<std::string, std::string> stored_hashes() {
  std::map<std::string, std::string> hashes;
  std::istringstream lines(read_file(kRun / "values.sha256"));
  std::string hash, name;
  while (lines >> hash >> name) {
    hashes[name] = hash;
  }
  return hashes;
}

}  // namespace

TEST(Version1Run, EveryValueIsReadOnAnyNumberOfRanks) {
  Communicator& world = test_world();
  const Manifest manifest = read_manifest(kCheckpoint);
  EXPECT_EQ(manifest.ranks, 2);
  EXPECT_EQ(manifest.info.step, 4);
  EXPECT_EQ(manifest.info.stage, "distill");
  EXPECT_EQ(manifest.info.stage_step, 2);
  EXPECT_EQ(manifest.info.next_row, 24);
  EXPECT_EQ(manifest.info.configuration, read_file(kRun / "config.toml"));

  std::vector<std::vector<float>> values;
  std::vector<ShardedTensor> tensors;
  for (const ManifestTensor& tensor : manifest.tensors) {
    const ShardRange range = shard_range(tensor.shape.size(), world.size(), world.rank());
    auto& part = values.emplace_back(static_cast<std::size_t>(range.size()), -1.0F);
    tensors.push_back({tensor.name,
                       tensor.shape,
                       range.begin,
                       range.end,
                       {part.data(), DType::f32, {range.size()}}});
  }
  load_checkpoint(kCheckpoint, tensors, world);

  const std::map<std::string, std::string> wanted = stored_hashes();
  EXPECT_EQ(wanted.size(), 63U);  // weights and two moments of 21 tensors
  EXPECT_EQ(tensors.size(), wanted.size());
  for (const ShardedTensor& tensor : tensors) {
    const std::string mine(static_cast<const char*>(tensor.data.data), tensor.data.bytes());
    Sha256 hash;
    for (const std::string& part : gather_texts(world, mine)) {
      hash.add(part.data(), part.size());
    }
    EXPECT_EQ(hash.hex(), wanted.at(tensor.name)) << tensor.name;
  }
}

}  // namespace bifocal
