// Documents of weighted sources packed into rows of fixed length: which document, cut where, lies
// in which row. Everything here reads lengths only.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/document_order.h"

namespace bifocal {

// Tokens [begin, begin + length) of a document of a source.
struct Piece {
  std::int64_t source = 0;
  std::int64_t document = 0;
  std::int64_t begin = 0;
  std::int64_t length = 0;

  bool operator==(const Piece&) const = default;
};

// What is done with documents longer than a row: cut into whole rows and a rest that is packed like
// a document, or kept out.
enum class LongDocuments : std::uint8_t { cut, drop };

struct PackOptions {
  std::int64_t row_tokens = 0;
  std::uint64_t seed = 0;
  LongDocuments long_documents = LongDocuments::cut;
  // Whether a source that ran out waits until all have, and their next epochs begin together, with
  // a row. Shares then follow the weights only until the first has run out.
  bool whole_epochs = false;
};

struct PackSource {
  std::string name;     // its order depends on it
  double weight = 1.0;  // share of the tokens, relative to the other sources'; 0: never drawn
  DocumentLengths* lengths = nullptr;
};

// What a source gave to the rows so far.
struct SourceCounts {
  std::int64_t documents = 0;       // begun in a row
  std::int64_t tokens = 0;          // in rows
  std::int64_t cut = 0;             // documents longer than a row that were cut
  std::int64_t dropped = 0;         // documents longer than a row that were kept out
  std::int64_t dropped_tokens = 0;  // in those
  std::int64_t epoch = 0;           // from 0: the pass over the documents of the last piece

  bool operator==(const SourceCounts&) const = default;
};

// What the rows before some position hold.
struct PackCounts {
  std::int64_t rows = 0;
  std::int64_t padding = 0;  // tokens
  std::vector<SourceCounts> sources;

  std::int64_t tokens() const;  // without padding

  bool operator==(const PackCounts&) const = default;
};

// One row. Its pieces stand side by side in this order, and padding follows.
struct RowPlan {
  std::int64_t position = 0;
  std::vector<Piece> pieces;
  std::int64_t padding = 0;
  PackCounts after;  // of rows [0, position]
};

// Makes row after row. A row takes its next piece from the source that lacks most tokens of its
// share and has one that fits: of the source's pending documents the one that, alone or with
// another, fills the row best, or every second time, while all of them fit, a random one. A bounded
// number of documents is pending, drawn in a pseudo-random order of the source's documents that
// each epoch has anew; a source's next epoch begins when all pieces of the one before lie in rows.
// All memory is bounded by constants times the number of sources; the rows are a function of the
// lengths and the options alone.
class RowPacker {
 public:
  // Where the packer stands; enough to continue from there.
  struct State;

  // Throws Error where no weight is positive. lengths must outlive the packer.
  RowPacker(std::vector<PackSource> sources, const PackOptions& options);

  // The next row. Throws Error where a source has no document that may be packed.
  RowPlan next();

  const PackCounts& counts() const { return state_.counts; }

  const State& state() const { return state_; }

  void restore(const State& state) { state_ = state; }

  struct Pending {
    std::int64_t document;
    std::int64_t begin;
    std::int64_t length;
  };

  struct SourceState {
    std::int64_t epoch = 0;     // that is being drawn from; its pieces alone are in the pool
    std::int64_t next = 0;      // place in the epoch's order of the document to draw
    std::int64_t cut = 0;       // its tokens that are drawn already
    std::int64_t drawn = 0;     // pieces drawn in this epoch
    std::int64_t deficit = 0;   // tokens that it lacks, times the sum of the shares
    std::vector<Pending> pool;  // by length
  };

  struct State {
    PackCounts counts;
    std::vector<SourceState> sources;
    std::uint64_t picks = 0;  // random choices so far
  };

 private:
  std::optional<std::size_t> choose(std::int64_t room);
  void refill(std::size_t index);
  void begin_epoch(std::size_t index);
  void draw(std::size_t index);
  Piece take(std::size_t index, std::int64_t room, bool at_random);

  PackOptions options_;
  std::vector<PackSource> sources_;
  std::vector<DocumentOrder> orders_;
  std::vector<std::int64_t> shares_;  // integers, so that sums are exact
  std::vector<std::size_t> active_;   // sources with a share
  std::vector<std::size_t> ranked_;   // scratch: the active sources by deficit
  State state_;
};

// Rows by position in any order. Steps forward are cheap; others replay from the nearest of a
// bounded number of snapshots. Not for several threads at once.
class RowSequence {
 public:
  explicit RowSequence(RowPacker packer);

  // The plan of a row, valid until the next call.
  const RowPlan& row(std::int64_t position);

  // What rows [0, position) hold.
  PackCounts counts(std::int64_t position);

 private:
  void go_to(std::int64_t position);
  void make_next();

  RowPacker packer_;
  PackCounts start_;
  std::vector<RowPacker::State> snapshots_;  // before rows 0, stride_, 2 stride_..
  std::int64_t stride_;
  std::deque<RowPlan> recent_;  // neighbouring rows, the last one made at the end
  std::size_t recent_pieces_ = 0;
};

}  // namespace bifocal
