// SHA-256 by OpenSSL, CRC-32 by zlib.
#include "checkpoint/file_hash.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <zlib.h>

#include "checkpoint/background_task.h"
#include "core/error.h"
#include "core/sha256.h"

namespace bifocal {

namespace {

class HashedFile {
 public:
  HashedFile(const std::filesystem::path& path, const std::stop_token& stop)
      : path_(path), stop_(stop), file_(std::fopen(path.c_str(), "rb"), std::fclose) {
    BIFOCAL_REQUIRE(
        file_ != nullptr, "[checkpoint] cannot open {}: {}", path_.string(), std::strerror(errno));
  }

  // CRC-32 of the next `bytes`; nothing where the file ends before.
  std::optional<std::uint32_t> take(std::int64_t bytes) {
    uLong crc = crc32(0, nullptr, 0);
    while (bytes > 0) {
      require_no_stop(stop_);
      const std::size_t wanted = std::min(buffer_.size(), static_cast<std::size_t>(bytes));
      const std::size_t got = std::fread(buffer_.data(), 1, wanted, file_.get());
      BIFOCAL_REQUIRE(std::ferror(file_.get()) == 0,
                      "[checkpoint] cannot read {}: {}",
                      path_.string(),
                      std::strerror(errno));
      hash_.add(buffer_.data(), got);
      crc = crc32(crc, buffer_.data(), static_cast<uInt>(got));
      at_ += static_cast<std::int64_t>(got);
      bytes -= static_cast<std::int64_t>(got);
      if (got < wanted) {
        return std::nullopt;
      }
    }
    return static_cast<std::uint32_t>(crc);
  }

  void take_rest() {
    while (take(static_cast<std::int64_t>(buffer_.size()))) {
    }
  }

  std::int64_t at() const { return at_; }

  std::string sha256() { return hash_.hex(); }

 private:
  const std::filesystem::path& path_;
  const std::stop_token& stop_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
  Sha256 hash_;
  std::vector<Bytef> buffer_ = std::vector<Bytef>(std::size_t{1} << 22);
  std::int64_t at_ = 0;
};

}  // namespace

FileHashes hash_file(const std::filesystem::path& path,
                     const std::vector<FilePiece>& pieces,
                     const std::stop_token& stop) {
  std::vector<std::size_t> order(pieces.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, {}, [&](std::size_t i) { return pieces[i].offset; });
  FileHashes hashes;
  hashes.crc32.resize(pieces.size());
  HashedFile file(path, stop);
  std::int64_t next = 0;
  for (const std::size_t i : order) {
    const FilePiece& piece = pieces[i];
    BIFOCAL_REQUIRE(piece.offset >= next && piece.bytes > 0,
                    "[checkpoint] {}: wanted pieces that do not overlap, got {} bytes at {}, where "
                    "one ends at {}",
                    path.string(),
                    piece.bytes,
                    piece.offset,
                    next);
    if (file.take(piece.offset - next)) {
      hashes.crc32[i] = file.take(piece.bytes);
    }
    next = piece.offset + piece.bytes;
  }
  file.take_rest();
  hashes.bytes = file.at();
  hashes.sha256 = file.sha256();
  return hashes;
}

}  // namespace bifocal
