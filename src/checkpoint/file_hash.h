// Hashes of a file and of pieces of it, from one reading.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

namespace bifocal {

// Bytes [offset, offset + bytes) of a file.
struct FilePiece {
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

struct FileHashes {
  std::int64_t bytes = 0;
  std::string sha256;
  // CRC-32 of each piece; nothing for one that the file does not hold whole.
  std::vector<std::optional<std::uint32_t>> crc32;
};

// The pieces come in any order and may not overlap. Throws Error where the file cannot be read, and
// when it is asked to stop.
FileHashes hash_file(const std::filesystem::path& path,
                     const std::vector<FilePiece>& pieces,
                     const std::stop_token& stop = {});

}  // namespace bifocal
