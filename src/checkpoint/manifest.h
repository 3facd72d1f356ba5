// The manifest of a checkpoint: what was saved, where each range lies, and the hashes that prove
// it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "core/error.h"

namespace bifocal {

inline constexpr std::int64_t kCheckpointFormatVersion = 1;
inline constexpr const char* kManifestName = "manifest.json";

// A checkpoint that a later bifocal wrote.
class NewerFormatError : public Error {
 public:
  using Error::Error;
};

struct ManifestFile {
  std::string name;  // inside the checkpoint's directory
  std::int64_t bytes = 0;
  std::string sha256;
};

// Where a chunk of a dataset lies in its file.
struct StoredChunk {
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
  std::uint32_t crc32 = 0;  // of these bytes
};

// Elements [begin, end) of a flattened tensor, in file `file` of the manifest.
struct TensorPart {
  std::int64_t file = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  // In the order of elements, of which each but the last has ceil((end - begin) / chunks.size()).
  // Empty: not known, as in manifests of older programs.
  std::vector<StoredChunk> chunks;
};

// The dataset of a range in a rank's file.
struct StoredRange {
  std::string name;  // of the tensor
  std::int64_t begin = 0;
  std::vector<StoredChunk> chunks;
};

struct ManifestTensor {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  std::vector<TensorPart> parts;  // ordered by begin; none is empty; together the whole tensor
};

struct Manifest {
  CheckpointInfo info;
  std::int64_t ranks = 0;
  std::vector<ManifestFile> files;
  std::vector<ManifestTensor> tensors;  // ordered by name
};

std::vector<std::int64_t> dims_of(const Shape& shape);

// The text of manifest.json. Its last field is the checksum: SHA-256 of the text without that field
// (docs/checkpoint_format.md).
std::string to_text(const Manifest& manifest);

// The inverse. Throws Error, naming `path`, unless the checksum and all fields are right;
// NewerFormatError for a newer format version.
Manifest parse_manifest(const std::string& text, const std::filesystem::path& path);

Manifest read_manifest(const std::filesystem::path& checkpoint);

// The tensors' ranges that one rank holds, as text; and all ranks' texts joined, where the text of
// rank r speaks of file r. Throws Error unless the ranks agree on each tensor's shape and type and
// their ranges cover each tensor once.
std::string describe(const std::vector<ShardedTensor>& tensors);
std::vector<ManifestTensor> join(const std::vector<std::string>& descriptions);

// The file that one rank wrote, as text; and all ranks' texts, in their order, added to a manifest
// that has the tensors.
std::string describe(const ManifestFile& file, const std::vector<StoredRange>& ranges);
void add_files(Manifest& manifest, const std::vector<std::string>& descriptions);

}  // namespace bifocal
