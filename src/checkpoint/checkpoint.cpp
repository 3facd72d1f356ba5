// Saving and loading of checkpoints by all ranks together.
#include "checkpoint/checkpoint.h"

#include <map>

#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/file_check.h"
#include "checkpoint/hdf5_file.h"
#include "checkpoint/manifest.h"
#include "checkpoint/run_together.h"
#include "checkpoint/step_directory.h"
#include "core/file.h"
#include "parallel/shard.h"

namespace bifocal {

namespace fs = std::filesystem;

namespace {

// Where some elements of a wanted tensor come from.
struct Read {
  const ShardedTensor* tensor = nullptr;
  std::int64_t part_begin = 0;
  ShardRange range;
};

// What to read from each file of the manifest.
std::map<std::int64_t, std::vector<Read>> plan_reads(const Manifest& manifest,
                                                     const std::vector<ShardedTensor>& tensors,
                                                     const fs::path& checkpoint) {
  std::map<std::string, const ManifestTensor*> saved;
  for (const ManifestTensor& tensor : manifest.tensors) {
    saved[tensor.name] = &tensor;
  }
  std::map<std::int64_t, std::vector<Read>> reads;
  for (const ShardedTensor& tensor : tensors) {
    const auto found = saved.find(tensor.name);
    BIFOCAL_REQUIRE(found != saved.end(),
                    "[checkpoint] {} holds no tensor {}: it belongs to another model",
                    checkpoint.string(),
                    tensor.name);
    BIFOCAL_REQUIRE(found->second->shape == tensor.global,
                    "[checkpoint] tensor {}: wanted {}, {} has {}: it belongs to another model",
                    tensor.name,
                    to_string(tensor.global),
                    checkpoint.string(),
                    to_string(found->second->shape));
    for (const TensorPart& part : found->second->parts) {
      const ShardRange range = intersection({part.begin, part.end}, {tensor.begin, tensor.end});
      if (range.size() > 0) {
        reads[part.file].push_back({&tensor, part.begin, range});
      }
    }
  }
  return reads;
}

}  // namespace

void save_checkpoint(const fs::path& directory,
                     const CheckpointInfo& info,
                     const std::vector<ShardedTensor>& tensors,
                     const KeepRule& keep,
                     Communicator& group) {
  CheckpointWriter writer(directory, keep, group);
  writer.start(info, tensors);
  writer.finish();
}

std::optional<fs::path> latest_checkpoint(const fs::path& directory) {
  const std::vector<std::int64_t> steps = complete_steps(directory);
  return steps.empty() ? std::nullopt : std::optional(step_path(directory, steps.front()));
}

CheckpointInfo read_checkpoint_info(const fs::path& checkpoint) {
  return read_manifest(checkpoint).info;
}

std::int64_t load_checkpoint(const fs::path& checkpoint,
                             const std::vector<ShardedTensor>& tensors,
                             Communicator& group) {
  // One rank reads the manifest, so that all see the same one.
  std::string text;
  const fs::path manifest_path = checkpoint / kManifestName;
  run_together(group, [&] {
    if (group.rank() == 0) {
      text = read_file(manifest_path);
    }
  });
  text = broadcast_text(group, text, 0);
  Manifest manifest;
  std::map<std::int64_t, std::vector<Read>> reads;
  run_together(group, [&] {
    manifest = parse_manifest(text, manifest_path);
    describe(tensors);
    reads = plan_reads(manifest, tensors, checkpoint);
    for (std::size_t file = 0; file < manifest.files.size(); ++file) {
      if (static_cast<int>(file % static_cast<std::size_t>(group.size())) == group.rank()) {
        check_rank_file(checkpoint, manifest, file);
      }
    }
  });
  run_together(group, [&] {
    for (const auto& [index, pieces] : reads) {
      const RankFile file(checkpoint / manifest.files[static_cast<std::size_t>(index)].name);
      for (const Read& piece : pieces) {
        const std::int64_t first = piece.tensor->begin;
        const TensorView flat = piece.tensor->data.reshape({piece.tensor->data.size()});
        file.read(piece.tensor->name,
                  piece.part_begin,
                  piece.range.begin,
                  flat.rows(piece.range.begin - first, piece.range.end - first));
      }
    }
  });
  std::int64_t bytes = 0;
  for (const ManifestFile& file : manifest.files) {
    bytes += file.bytes;
  }
  return bytes;
}

}  // namespace bifocal
