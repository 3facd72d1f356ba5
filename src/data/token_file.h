// Token shards on disk: one HDF5 file of tokenised documents of one split and vocabulary.
// Root attributes: format, format_version (1), vocabulary, vocabulary_hash, split, largest_id.
// Datasets, in chunks with Fletcher32: ids [tokens] int32, keep [tokens] uint8 (0 or 1),
// offsets [documents + 1] int64 (document i is ids[offsets[i], offsets[i + 1])).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/hdf5_handle.h"
#include "data/row_source.h"

namespace bifocal {

// SHA-256 in lower-case hexadecimal of the words, each followed by a line break, in the order of
// their ids.
std::string vocabulary_hash(std::span<const std::string> words);

// The hash for data whose only known vocabulary is "ids below `size`".
std::string vocabulary_hash(std::int64_t size);

// The split of a document: held_out where the first 64 bits of the SHA-256 of its ids (little
// endian int32), as a fraction of 2^64, are below `held_out_share`. Equal documents share a split.
Split split_of(std::span<const std::int32_t> ids, double held_out_share);

// "train" or "held_out".
std::string_view split_name(Split split);

struct TokenFileHeader {
  std::int64_t vocabulary = 0;  // ids are below it
  std::string vocabulary_hash;
  Split split = Split::train;
};

// Gathers documents in memory and writes them as one shard.
class TokenFileWriter {
 public:
  explicit TokenFileWriter(TokenFileHeader header);

  std::int64_t documents() const { return static_cast<std::int64_t>(offsets_.size()) - 1; }

  std::int64_t tokens() const { return offsets_.back(); }

  // Both spans have one entry per token. Throws Error for an empty document, ids outside the
  // vocabulary and keep entries other than 0 and 1.
  void append(std::span<const std::int32_t> ids, std::span<const std::uint8_t> keep);

  // Writes "path.partial", closes it and renames it to `path`, so that no half-written shard is
  // ever read. At least one document is needed.
  void write(const std::string& path) const;

 private:
  void write_file(const std::string& path) const;

  TokenFileHeader header_;
  std::vector<std::int64_t> offsets_ = {0};
  std::vector<std::int32_t> ids_;
  std::vector<std::uint8_t> keep_;
  std::int32_t largest_id_ = 0;
};

// A shard open for reading. Nothing of it lies in memory but its header and the library's caches of
// a few chunks. Not for several threads at once.
class TokenFile {
 public:
  // Throws Error for a file that is no complete token shard of a known version.
  explicit TokenFile(const std::string& path);

  const std::string& path() const { return path_; }

  const TokenFileHeader& header() const { return header_; }

  std::int32_t largest_id() const { return largest_id_; }

  std::int64_t documents() const { return documents_; }

  std::int64_t tokens() const { return tokens_; }

  // Entries [first, first + out.size()) of the documents + 1 offsets: the first token of each
  // document, and at the end the number of tokens. Throws Error for corrupt bytes, and where the
  // entries do not grow.
  void read_offsets(std::int64_t first, std::span<std::int64_t> out) const;

  // Reads ids or keep of tokens [begin, begin + out.size()). Throws Error for corrupt bytes.
  void read_ids(std::int64_t begin, std::span<std::int32_t> out) const;
  void read_keep(std::int64_t begin, std::span<std::uint8_t> out) const;

 private:
  void read_header();
  void open_datasets();

  std::string path_;
  TokenFileHeader header_;
  std::int32_t largest_id_ = 0;
  std::int64_t documents_ = 0;
  std::int64_t tokens_ = 0;
  Hdf5Handle file_;  // closed last
  Hdf5Handle offsets_;
  Hdf5Handle ids_;
  Hdf5Handle keep_;
};

}  // namespace bifocal
