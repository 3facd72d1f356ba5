// The check of a rank's file, and the search for its damage.
#include "checkpoint/file_check.h"

#include <algorithm>
#include <system_error>

#include "checkpoint/file_hash.h"
#include "checkpoint/hdf5_file.h"
#include "core/sha256.h"

namespace bifocal {

namespace {

namespace fs = std::filesystem;

// A chunk of a dataset, and what the error's text says of it.
struct NamedChunk {
  const ManifestTensor* tensor = nullptr;
  const TensorPart* part = nullptr;
  std::size_t index = 0;

  const StoredChunk& stored() const { return part->chunks[index]; }

  std::string text() const {
    const auto count = static_cast<std::int64_t>(part->chunks.size());
    const std::int64_t elements = (part->end - part->begin + count - 1) / count;
    const std::int64_t begin = part->begin + static_cast<std::int64_t>(index) * elements;
    return fmt::format("dataset {}, in elements {} to {} of the tensor",
                       dataset_path(tensor->name, part->begin),
                       begin,
                       std::min(begin + elements, part->end) - 1);
  }
};

// The chunks of all datasets of the file; empty where the manifest does not know them all.
std::vector<NamedChunk> chunks_in(const Manifest& manifest, std::size_t file) {
  std::vector<NamedChunk> chunks;
  for (const ManifestTensor& tensor : manifest.tensors) {
    for (const TensorPart& part : tensor.parts) {
      if (part.file != static_cast<std::int64_t>(file)) {
        continue;
      }
      if (part.chunks.empty()) {
        return {};
      }
      for (std::size_t index = 0; index < part.chunks.size(); ++index) {
        chunks.push_back({&tensor, &part, index});
      }
    }
  }
  return chunks;
}

// Where the damage of the file lies, as the end of a clause; empty where the manifest cannot tell.
std::string damage_of(const fs::path& path, const Manifest& manifest, std::size_t file) {
  const std::vector<NamedChunk> chunks = chunks_in(manifest, file);
  if (chunks.empty()) {
    return "";
  }
  std::vector<FilePiece> pieces;
  pieces.reserve(chunks.size());
  for (const NamedChunk& chunk : chunks) {
    pieces.push_back({chunk.stored().offset, chunk.stored().bytes});
  }
  const FileHashes hashes = hash_file(path, pieces);
  const NamedChunk* first = nullptr;
  std::size_t others = 0;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    if (hashes.crc32[i] == chunks[i].stored().crc32) {
      continue;
    }
    others += first == nullptr ? 0 : 1;
    if (first == nullptr || chunks[i].stored().offset < first->stored().offset) {
      first = &chunks[i];
    }
  }
  if (first == nullptr) {
    return "; the damage lies in the file's structure, every dataset is whole";
  }
  std::string text = "; the damage lies in " + first->text();
  if (others > 0) {
    text += fmt::format(", and in {} other {}", others, others == 1 ? "chunk" : "chunks");
  }
  return text;
}

}  // namespace

void check_rank_file(const fs::path& checkpoint, const Manifest& manifest, std::size_t file) {
  const ManifestFile& wanted = manifest.files[file];
  const fs::path path = checkpoint / wanted.name;
  std::error_code absent;
  const auto bytes = static_cast<std::int64_t>(fs::file_size(path, absent));
  BIFOCAL_REQUIRE(!absent,
                  "[checkpoint] cannot read {}: {}: use another checkpoint",
                  path.string(),
                  absent.message());
  BIFOCAL_REQUIRE(bytes == wanted.bytes,
                  "[checkpoint] {} is damaged: wanted {} bytes, got {}{}: use another checkpoint",
                  path.string(),
                  wanted.bytes,
                  bytes,
                  damage_of(path, manifest, file));
  const std::string sha256 = sha256_hex_of_file(path);
  BIFOCAL_REQUIRE(sha256 == wanted.sha256,
                  "[checkpoint] {} is damaged: wanted SHA-256 {}, got {}{}: use another checkpoint",
                  path.string(),
                  wanted.sha256,
                  sha256,
                  damage_of(path, manifest, file));
}

}  // namespace bifocal
