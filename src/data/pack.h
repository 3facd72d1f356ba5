// Documents packed into rows of fixed length: which document, cut where, lies in which row.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace bifocal {

// Tokens [begin, begin + length) of a document.
struct Piece {
  std::int64_t document = 0;
  std::int64_t begin = 0;
  std::int64_t length = 0;
};

// The rows of one epoch. Row r holds pieces[row_begin[r], row_begin[r + 1]) side by side.
struct PackingPlan {
  std::vector<Piece> pieces;
  std::vector<std::int64_t> row_begin = {0};  // [rows + 1]

  std::int64_t rows() const { return static_cast<std::int64_t>(row_begin.size()) - 1; }

  std::span<const Piece> row(std::int64_t index) const {
    const auto begin = static_cast<std::size_t>(row_begin[static_cast<std::size_t>(index)]);
    const auto end = static_cast<std::size_t>(row_begin[static_cast<std::size_t>(index) + 1]);
    return std::span<const Piece>(pieces).subspan(begin, end - begin);
  }
};

// Best fit over a random order of the documents (lengths >= 1, all finite): each goes to the
// fullest row that still holds it, else opens one. Longer documents are cut into whole rows and a
// rest that is packed like a document. Rows come in a random order too. A function of
// (lengths, row_tokens, seed, epoch) alone; every token lies in exactly one row.
PackingPlan pack_rows(std::span<const std::int64_t> lengths,
                      std::int64_t row_tokens,
                      std::uint64_t seed,
                      std::int64_t epoch);

}  // namespace bifocal
