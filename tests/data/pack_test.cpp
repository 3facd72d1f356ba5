// Packing of documents into rows.
#include "data/pack.h"

#include <map>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "core/random.h"
#include "data/register_machine.h"

namespace bifocal {
namespace {

// Lengths of register-machine documents with log-uniform step counts, as in training.
std::vector<std::int64_t> register_machine_lengths(std::int64_t count) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < count; ++i) {
    lengths.push_back(25 + 21 * draw_steps(5, i, 1, 46));
  }
  return lengths;
}

std::vector<std::int64_t> flat(const PackingPlan& plan) {
  std::vector<std::int64_t> numbers;
  for (std::int64_t r = 0; r < plan.rows(); ++r) {
    for (const Piece& piece : plan.row(r)) {
      numbers.insert(numbers.end(), {r, piece.document, piece.begin, piece.length});
    }
  }
  return numbers;
}

// Every token of every document lies in one row, and no row is too full.
void expect_exact_cover(const std::vector<std::int64_t>& lengths,
                        std::int64_t row_tokens,
                        const PackingPlan& plan) {
  std::map<std::int64_t, std::map<std::int64_t, std::int64_t>> pieces;  // document, begin, length
  for (std::int64_t r = 0; r < plan.rows(); ++r) {
    std::int64_t used = 0;
    for (const Piece& piece : plan.row(r)) {
      used += piece.length;
      EXPECT_TRUE(pieces[piece.document].emplace(piece.begin, piece.length).second);
    }
    EXPECT_GE(used, 1);
    EXPECT_LE(used, row_tokens);
  }
  ASSERT_EQ(pieces.size(), lengths.size());
  for (const auto& [document, parts] : pieces) {
    std::int64_t reached = 0;
    for (const auto& [begin, length] : parts) {
      EXPECT_EQ(begin, reached);
      reached += length;
    }
    EXPECT_EQ(reached, lengths[static_cast<std::size_t>(document)]);
  }
}

TEST(Pack, EveryTokenLiesInOneRow) {
  std::vector<std::int64_t> lengths;
  for (std::uint64_t i = 0; i < 500; ++i) {
    lengths.push_back(1 + static_cast<std::int64_t>(random_below(300, 1, 2, i)));
  }
  for (const std::int64_t row_tokens : {1, 7, 97, 128, 299, 5000}) {
    for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
      expect_exact_cover(lengths, row_tokens, pack_rows(lengths, row_tokens, 3, epoch));
    }
  }
}

TEST(Pack, OnlyTheRestOfALongDocumentSharesARow) {
  const std::vector<std::int64_t> lengths = {25, 5, 10};
  const PackingPlan plan = pack_rows(lengths, 10, 0, 0);
  expect_exact_cover(lengths, 10, plan);
  EXPECT_EQ(plan.rows(), 4);  // 10 + 10 of the first, its rest of 5 with the second, the third
}

TEST(Pack, PaddingIsSmallOnRegisterMachineLengths) {
  const std::vector<std::int64_t> lengths = register_machine_lengths(4000);
  const std::int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    const PackingPlan plan = pack_rows(lengths, 1024, 11, epoch);
    const auto rows = static_cast<double>(plan.rows());
    EXPECT_LT(1.0 - static_cast<double>(tokens) / (rows * 1024.0), 0.02);
  }
}

TEST(Pack, DependsOnSeedAndEpochAlone) {
  const std::vector<std::int64_t> lengths = register_machine_lengths(300);
  const auto first = flat(pack_rows(lengths, 1024, 1, 0));
  EXPECT_EQ(first, flat(pack_rows(lengths, 1024, 1, 0)));
  EXPECT_NE(first, flat(pack_rows(lengths, 1024, 1, 1)));
  EXPECT_NE(first, flat(pack_rows(lengths, 1024, 2, 0)));
}

TEST(Pack, RowsOfLateDocumentsAreSpreadOverTheEpoch) {
  // Rows that packing opened last are emptier: they must not all come at the epoch's end.
  const std::vector<std::int64_t> lengths = register_machine_lengths(4000);
  const PackingPlan plan = pack_rows(lengths, 1024, 4, 0);
  double first_half = 0.0;
  double second_half = 0.0;
  for (std::int64_t r = 0; r < plan.rows(); ++r) {
    (r < plan.rows() / 2 ? first_half : second_half) += static_cast<double>(plan.row(r).size());
  }
  EXPECT_NEAR(first_half / second_half, 1.0, 0.1);  // about 700 rows: 3 deviations are below 0.1
}

}  // namespace
}  // namespace bifocal
