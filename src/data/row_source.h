// Rows of a training set by position. The order is a function of (seed, position) alone, whatever
// the number of ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/row.h"

namespace bifocal {

enum class Split : std::uint8_t { train, held_out };

enum class Keep : std::uint8_t { all, assistant };

struct RowSourceOptions {
  std::vector<std::string> paths;  // token shards, or directories that hold them
  Split split = Split::train;
  std::int64_t row_tokens = 0;
  Keep keep = Keep::all;
  std::uint64_t seed = 0;
  std::int64_t vocabulary =
      0;  // ids must be below it; shards of another vocabulary hash than each other are refused
  std::int32_t pad_id = 0;
};

// What packing did, over one epoch.
struct PackingReport {
  std::int64_t documents = 0;
  std::int64_t tokens = 0;  // without padding
  std::int64_t padding = 0;
  std::int64_t rows = 0;      // of one epoch
  std::int64_t too_long = 0;  // documents longer than a row, cut into pieces
};

class RowSource {
 public:
  // Reads document lengths; ids are read row by row. Throws Error for missing, mixed or corrupt
  // shards and where no row can be formed.
  explicit RowSource(const RowSourceOptions& options);
  ~RowSource();
  RowSource(const RowSource&) = delete;
  RowSource& operator=(const RowSource&) = delete;
  RowSource(RowSource&&) noexcept;
  RowSource& operator=(RowSource&&) noexcept;

  // Row `position` (from 0) of an endless sequence of epochs, each in an order of its own. A piece
  // of a document that was cut is a document of its row: nothing follows its last token. Safe to
  // call from several threads. Throws Error for corrupt bytes.
  Row row(std::int64_t position) const;

  const PackingReport& report() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace bifocal
