// Checkpoints: complete or absent, independent of the layout they were written under
// (docs/checkpoint_format.md).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "parallel/communicator.h"

namespace bifocal {

// Elements [begin, end) of a named tensor of shape `global`, flattened, held here. float32 or
// float64.
struct ShardedTensor {
  std::string name;  // no '/', not "." or ".."
  Shape global;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  TensorView data;  // [end - begin]
};

struct CheckpointInfo {
  std::int64_t step = 0;        // optimiser steps done over all stages; names the directory
  std::string stage;            // stage the next step belongs to
  std::int64_t stage_step = 0;  // steps done of that stage
  std::int64_t next_row = 0;    // data position
  std::string model_hash;       // of what makes two checkpoints incompatible (shape, mixers, data)
  std::string configuration;    // resolved configuration file
  std::string model_config;     // config.json of the student
  std::int64_t skipped = 0;     // of stage_step, those without an update
};

// Which complete checkpoints stay when another one is complete.
struct KeepRule {
  std::int64_t newest = 0;        // this many of the newest; 0: all
  std::int64_t multiples_of = 0;  // besides, those whose step is a multiple of it; 0: none
};

// Collective. Writes `directory`/step_N (see docs/checkpoint_format.md) and returns once it is
// complete; then deletes all that `keep` does not spare, never the one just written. A complete
// step_N that is there already is replaced in one step. The ranges that the ranks pass must cover
// each tensor once. The group's ranks must see one file system. On failure the same Error on every
// rank, earlier checkpoints untouched. CheckpointWriter does the same beside other work.
void save_checkpoint(const std::filesystem::path& directory,
                     const CheckpointInfo& info,
                     const std::vector<ShardedTensor>& tensors,
                     const KeepRule& keep,
                     Communicator& group);

// The newest complete checkpoint's directory; nothing where there is none. One whose manifest is
// absent or damaged does not count; one of a newer format version throws Error.
std::optional<std::filesystem::path> latest_checkpoint(const std::filesystem::path& directory);

// Reads and checks the manifest: its own checksum, format version. Throws Error for a damaged or
// newer one.
CheckpointInfo read_checkpoint_info(const std::filesystem::path& checkpoint);

// Collective. Fills every tensor's range from whichever files hold it, after checking each file's
// SHA-256 (every file is checked by one rank). A float32 tensor may be read as float64 and the
// other way round (rounded to nearest). Throws the same Error on every rank for a missing tensor,
// another shape, or a file that is absent, truncated or altered. Returns the bytes of all files.
std::int64_t load_checkpoint(const std::filesystem::path& checkpoint,
                             const std::vector<ShardedTensor>& tensors,
                             Communicator& group);

}  // namespace bifocal
