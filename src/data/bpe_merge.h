// Byte pair encoding: the table of merges and their application to one piece of text.
#pragma once

#include <cstdint>
#include <vector>

namespace bifocal {

struct Merge {
  std::int32_t rank;  // lower ranks are merged first
  std::int32_t id;    // of the token that the pair becomes
};

// Pairs of token ids.
class MergeTable {
 public:
  // Room for `count` pairs.
  explicit MergeTable(std::size_t count);

  // A pair that is there already gets the new merge. No more pairs than there is room for.
  void insert(std::int32_t left, std::int32_t right, Merge merge);

  // Null where the pair is never merged.
  const Merge* find(std::int32_t left, std::int32_t right) const;

 private:
  struct Entry {
    std::uint64_t pair;
    Merge merge;
  };

  std::size_t slot_of(std::uint64_t pair) const;

  unsigned shift_;
  std::vector<Entry> entries_;
};

struct Symbol {
  std::int32_t id;
  std::uint32_t begin;  // byte of the piece; carried along
};

// Reused between calls.
struct MergeScratch {
  std::vector<std::int32_t> ranks;
  std::vector<std::uint32_t> previous;
  std::vector<std::uint32_t> next;
  std::vector<std::uint64_t> heap;
};

// Merges neighbours, the pair of the lowest rank first and of these the leftmost, until none is
// left. n symbols take O(n log n) time; fewer than 2^32 of them.
void merge_symbols(const MergeTable& table, std::vector<Symbol>& symbols, MergeScratch& scratch);

}  // namespace bifocal
