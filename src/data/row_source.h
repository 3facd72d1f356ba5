// Rows of a data set by position. The order is a function of (shards, weights, seed, position)
// alone, whatever the number of ranks; memory does not grow with the number of documents.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/mixture.h"
#include "data/pack.h"
#include "data/row.h"

namespace bifocal {

enum class Split : std::uint8_t { train, held_out };

enum class Keep : std::uint8_t { all, assistant };

struct RowSourceOptions {
  Mixture mixture;  // one source or more; shards of different vocabulary hashes are refused
  Split split = Split::train;
  std::int64_t row_tokens = 0;
  LongDocuments long_documents = LongDocuments::cut;
  Keep keep = Keep::all;
  std::uint64_t seed = 0;
  std::int64_t vocabulary = 0;  // ids must be below it; 0: that of the shards
  std::int32_t pad_id = 0;
};

// A source as it lies on disk, of the split that is read.
struct SourceSize {
  std::string name;
  double weight = 0.0;  // of all weights, which sum to 1 here
  std::int64_t shards = 0;
  std::int64_t documents = 0;
  std::int64_t tokens = 0;

  // How often rows went through the source: 1.5 is once, and a second time through half.
  double epochs(const SourceCounts& counts) const;
};

class RowSource {
 public:
  // Opens every shard once. Throws Error for missing, mixed or corrupt shards and a source without
  // documents of the split.
  explicit RowSource(const RowSourceOptions& options);
  ~RowSource();
  RowSource(const RowSource&) = delete;
  RowSource& operator=(const RowSource&) = delete;
  RowSource(RowSource&&) noexcept;
  RowSource& operator=(RowSource&&) noexcept;

  // All that follows is safe to call from several threads, and throws Error for corrupt bytes and
  // where no document may be packed. Positions count from 0, without end, and may be asked in any
  // order; what is near the last one asked costs least.

  // A piece of a document that was cut is a document of its row: nothing follows its last token.
  Row row(std::int64_t position) const;

  // What a row is made of; reads lengths only.
  RowPlan plan(std::int64_t position) const;

  // What rows [0, position) hold. counts.sources has the order of sources().
  PackCounts counts(std::int64_t position) const;

  // How many of the first `most` rows come before any document comes a second time. Rows of
  // held-out documents repeat none until all have come.
  std::int64_t rows_without_repeats(std::int64_t most) const;

  const std::vector<SourceSize>& sources() const;

  // [i]: documents of 2^i to 2^(i+1) - 1 tokens in a source. Reads all of its lengths.
  std::vector<std::int64_t> length_histogram(std::size_t source) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace bifocal
