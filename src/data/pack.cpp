// Best-fit packing of documents into rows.
#include "data/pack.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/random.h"

namespace bifocal {

namespace {

// A random order of 0..size-1 (Fisher and Yates).
std::vector<std::int64_t> permutation(std::size_t size, std::uint64_t seed, std::uint64_t stream) {
  std::vector<std::int64_t> order(size);
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = size; i > 1; --i) {
    std::swap(order[i - 1], order[random_below(i, seed, stream, i)]);
  }
  return order;
}

// Rows under construction: pieces in the order they were placed, and the room left in each row.
class OpenRows {
 public:
  explicit OpenRows(std::int64_t row_tokens) : row_tokens_(row_tokens) {}

  std::int64_t rows() const { return rows_; }

  void place(const Piece& piece) {
    const auto found = room_.lower_bound({piece.length, 0});
    std::int64_t row = rows_;
    std::int64_t left = row_tokens_;
    if (found != room_.end()) {
      std::tie(left, row) = *found;
      room_.erase(found);
    } else {
      ++rows_;
    }
    pieces_.emplace_back(row, piece);
    if (left > piece.length) {
      room_.emplace(left - piece.length, row);
    }
  }

  // Rows in the order in which `order` names them.
  PackingPlan finish(const std::vector<std::int64_t>& order) const {
    std::vector<std::size_t> place(order.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
      place[static_cast<std::size_t>(order[i])] = i;
    }
    PackingPlan plan;
    plan.row_begin.assign(order.size() + 1, 0);
    for (const auto& [row, piece] : pieces_) {
      ++plan.row_begin[place[static_cast<std::size_t>(row)] + 1];
    }
    std::partial_sum(plan.row_begin.begin(), plan.row_begin.end(), plan.row_begin.begin());
    std::vector<std::int64_t> next(plan.row_begin.begin(), plan.row_begin.end() - 1);
    plan.pieces.resize(pieces_.size());
    for (const auto& [row, piece] : pieces_) {
      plan.pieces[static_cast<std::size_t>(next[place[static_cast<std::size_t>(row)]]++)] = piece;
    }
    return plan;
  }

 private:
  std::int64_t row_tokens_;
  std::int64_t rows_ = 0;
  std::vector<std::pair<std::int64_t, Piece>> pieces_;    // row, piece
  std::set<std::pair<std::int64_t, std::int64_t>> room_;  // tokens left, row
};

}  // namespace

PackingPlan pack_rows(std::span<const std::int64_t> lengths,
                      std::int64_t row_tokens,
                      std::uint64_t seed,
                      std::int64_t epoch) {
  BIFOCAL_ASSERT(row_tokens >= 1 && epoch >= 0);
  const auto stream = [epoch](std::string_view name) {
    return random_bits(stream_of(name), 0, static_cast<std::uint64_t>(epoch));
  };
  OpenRows open(row_tokens);
  for (const std::int64_t document : permutation(lengths.size(), seed, stream("pack.documents"))) {
    const std::int64_t length = lengths[static_cast<std::size_t>(document)];
    for (std::int64_t begin = 0; begin < length; begin += row_tokens) {
      open.place({document, begin, std::min(row_tokens, length - begin)});
    }
  }
  return open.finish(permutation(static_cast<std::size_t>(open.rows()), seed, stream("pack.rows")));
}

}  // namespace bifocal
