// Merging by search in short pieces and by a heap in long ones.
#include "data/bpe_merge.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <utility>

#include "core/error.h"

namespace bifocal {

namespace {

constexpr std::uint64_t kNoPair = ~std::uint64_t{0};
constexpr std::int32_t kNoRank = std::numeric_limits<std::int32_t>::max();
constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();
constexpr std::size_t kLongPiece = 48;  // symbols from which the heap is faster

std::uint64_t pair_of(std::int32_t left, std::int32_t right) {
  return (std::uint64_t{static_cast<std::uint32_t>(left)} << 32U) |
         static_cast<std::uint32_t>(right);
}

std::int32_t rank_of(const MergeTable& table, std::int32_t left, std::int32_t right) {
  const Merge* merge = table.find(left, right);
  return merge == nullptr ? kNoRank : merge->rank;
}

void merge_short(const MergeTable& table,
                 std::vector<Symbol>& symbols,
                 std::vector<std::int32_t>& ranks) {
  ranks.assign(symbols.size(), kNoRank);
  for (std::size_t i = 0; i + 1 < symbols.size(); ++i) {
    ranks[i] = rank_of(table, symbols[i].id, symbols[i + 1].id);
  }
  for (;;) {
    const auto lowest = std::ranges::min_element(ranks);
    if (lowest == ranks.end() || *lowest == kNoRank) {
      return;
    }
    const auto i = static_cast<std::size_t>(lowest - ranks.begin());
    symbols[i].id = table.find(symbols[i].id, symbols[i + 1].id)->id;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    ranks.erase(lowest + 1);
    ranks[i] = i + 1 < symbols.size() ? rank_of(table, symbols[i].id, symbols[i + 1].id) : kNoRank;
    if (i > 0) {
      ranks[i - 1] = rank_of(table, symbols[i - 1].id, symbols[i].id);
    }
  }
}

// A chain of the symbols that are left. The heap holds rank and place; an entry counts while the
// place still has that rank, which names one pair.
class LongMerge {
 public:
  LongMerge(const MergeTable& table, std::vector<Symbol>& symbols, MergeScratch& scratch)
      : table_(table), symbols_(symbols), scratch_(scratch) {
    const std::size_t count = symbols.size();
    scratch.ranks.assign(count, kNoRank);
    scratch.previous.resize(count);
    scratch.next.resize(count);
    scratch.heap.clear();
    for (std::size_t i = 0; i < count; ++i) {
      scratch.previous[i] = i == 0 ? kNone : static_cast<std::uint32_t>(i - 1);
      scratch.next[i] = i + 1 == count ? kNone : static_cast<std::uint32_t>(i + 1);
    }
  }

  void run() {
    for (std::size_t i = 0; i + 1 < symbols_.size(); ++i) {
      rank(static_cast<std::uint32_t>(i));
    }
    std::ranges::make_heap(scratch_.heap, std::greater{});
    is_heap_ = true;
    while (!scratch_.heap.empty()) {
      std::ranges::pop_heap(scratch_.heap, std::greater{});
      const std::uint64_t top = scratch_.heap.back();
      scratch_.heap.pop_back();
      const auto at = static_cast<std::uint32_t>(top);
      if (std::cmp_equal(scratch_.ranks[at], top >> 32U)) {
        merge(at);
      }
    }
    compact();
  }

 private:
  // Ranks the pair that begins at a symbol.
  void rank(std::uint32_t at) {
    const std::uint32_t next = scratch_.next[at];
    const std::int32_t rank =
        next == kNone ? kNoRank : rank_of(table_, symbols_[at].id, symbols_[next].id);
    scratch_.ranks[at] = rank;
    if (rank != kNoRank) {
      scratch_.heap.push_back((std::uint64_t{static_cast<std::uint32_t>(rank)} << 32U) | at);
      if (is_heap_) {
        std::ranges::push_heap(scratch_.heap, std::greater{});
      }
    }
  }

  void merge(std::uint32_t at) {
    const std::uint32_t gone = scratch_.next[at];
    symbols_[at].id = table_.find(symbols_[at].id, symbols_[gone].id)->id;
    scratch_.ranks[gone] = kNoRank;
    symbols_[gone].id = -1;
    scratch_.next[at] = scratch_.next[gone];
    if (scratch_.next[at] != kNone) {
      scratch_.previous[scratch_.next[at]] = at;
    }
    rank(at);
    if (scratch_.previous[at] != kNone) {
      rank(scratch_.previous[at]);
    }
  }

  void compact() {
    std::size_t count = 0;
    for (std::uint32_t at = 0; at != kNone; at = scratch_.next[at]) {
      symbols_[count++] = symbols_[at];
    }
    symbols_.resize(count);
  }

  const MergeTable& table_;
  std::vector<Symbol>& symbols_;
  MergeScratch& scratch_;
  bool is_heap_ = false;
};

}  // namespace

MergeTable::MergeTable(std::size_t count)
    : shift_(64U - static_cast<unsigned>(std::bit_width(count * 2 + 1))),
      entries_(std::size_t{1} << (64U - shift_), Entry{kNoPair, {}}) {}

std::size_t MergeTable::slot_of(std::uint64_t pair) const {
  std::size_t slot = (pair * 0x9E3779B97F4A7C15U) >> shift_;
  while (entries_[slot].pair != pair && entries_[slot].pair != kNoPair) {
    slot = (slot + 1) & (entries_.size() - 1);
  }
  return slot;
}

void MergeTable::insert(std::int32_t left, std::int32_t right, Merge merge) {
  const std::uint64_t pair = pair_of(left, right);
  entries_[slot_of(pair)] = {pair, merge};
}

const Merge* MergeTable::find(std::int32_t left, std::int32_t right) const {
  const Entry& entry = entries_[slot_of(pair_of(left, right))];
  return entry.pair == kNoPair ? nullptr : &entry.merge;
}

void merge_symbols(const MergeTable& table, std::vector<Symbol>& symbols, MergeScratch& scratch) {
  BIFOCAL_ASSERT(symbols.size() < kNone);
  if (symbols.size() < kLongPiece) {
    merge_short(table, symbols, scratch.ranks);
  } else {
    LongMerge(table, symbols, scratch).run();
  }
}

}  // namespace bifocal
