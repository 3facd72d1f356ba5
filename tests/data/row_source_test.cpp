// Rows read from token shards.
#include "data/row_source.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/random.h"
#include "data/token_file.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

constexpr std::int64_t kVocabulary = 5000;
constexpr std::int32_t kPad = 4999;

// Two train shards and a held-out one. Document i starts with id i, and its other ids are at least
// 2000; every third entry of keep is set.
class Shards {
 public:
  Shards() {
    write("train-00000.h5", Split::train, 0, 40);
    write("train-00001.h5", Split::train, 40, 90);
    write("held_out-00000.h5", Split::held_out, 90, 95);
  }

  RowSourceOptions options(std::int64_t row_tokens) const {
    RowSourceOptions options;
    options.paths = {directory_.path()};
    options.row_tokens = row_tokens;
    options.seed = 3;
    options.vocabulary = kVocabulary;
    options.pad_id = kPad;
    return options;
  }

  void write(const std::string& name,
             Split split,
             std::int32_t first,
             std::int32_t end,
             const std::string& hash = vocabulary_hash(kVocabulary)) {
    TokenFileWriter writer({kVocabulary, hash, split});
    for (std::int32_t i = first; i < end; ++i) {
      std::vector<std::int32_t> ids = {i};
      const auto length = 1 + random_below(60, 7, 0, static_cast<std::uint64_t>(i));
      for (std::uint64_t t = 1; t < length; ++t) {
        ids.push_back(2000 + static_cast<std::int32_t>(
                                 random_below(2900, 8, static_cast<std::uint64_t>(i), t)));
      }
      std::vector<std::uint8_t> keep(ids.size());
      for (std::size_t t = 0; t < keep.size(); ++t) {
        keep[t] = t % 3 == 0 ? 1 : 0;
      }
      writer.append(ids, keep);
      documents[i] = std::move(ids);
    }
    writer.write(directory_.path(name));
  }

  std::string path(const std::string& name) const { return directory_.path(name); }

  std::map<std::int32_t, std::vector<std::int32_t>> documents;

 private:
  test::TemporaryDirectory directory_;
};

bool equal(const Row& a, const Row& b) {
  return a.ids == b.ids && a.next == b.next && a.start == b.start && a.keep == b.keep &&
         a.padding == b.padding;
}

// The documents of a row, by `start`, padding left out. Checks next, start and padding on the way.
std::vector<std::vector<std::int32_t>> split_row(const Row& row) {
  std::vector<std::vector<std::int32_t>> documents;
  const std::int64_t used = row.tokens() - row.padding;
  for (std::int64_t t = 0; t < row.tokens(); ++t) {
    const auto i = static_cast<std::size_t>(t);
    if (t >= used) {
      EXPECT_EQ(row.start[i], used);
      EXPECT_EQ(row.ids[i], kPad);
      EXPECT_EQ(row.next[i], -1);
      EXPECT_EQ(row.keep[i], 0);
      continue;
    }
    if (row.start[i] == t) {
      documents.emplace_back();
    }
    documents.back().push_back(row.ids[i]);
    EXPECT_EQ(row.start[i], t + 1 - static_cast<std::int64_t>(documents.back().size()));
    const bool is_last = t + 1 == used || row.start[i + 1] == t + 1;
    EXPECT_EQ(row.next[i], is_last ? -1 : row.ids[i + 1]);
  }
  return documents;
}

TEST(RowSource, AnEpochHoldsEveryTrainDocumentOnce) {
  const Shards shards;
  const RowSource source(shards.options(97));
  std::int64_t position = 0;
  for (int epoch = 0; epoch < 3; ++epoch) {
    std::set<std::int32_t> seen;
    while (seen.size() < 90) {
      for (const auto& document : split_row(source.row(position))) {
        EXPECT_EQ(document, shards.documents.at(document[0]));
        EXPECT_TRUE(seen.insert(document[0]).second);
      }
      ++position;
    }
    EXPECT_EQ(*seen.rbegin(), 89);
    if (epoch == 0) {
      EXPECT_EQ(position, source.report().rows);
    }
  }
}

TEST(RowSource, ReportCountsTheFirstEpoch) {
  const Shards shards;
  const RowSource source(shards.options(97));
  const PackingReport& report = source.report();
  std::int64_t tokens = 0;
  std::int64_t padding = 0;
  for (std::int64_t r = 0; r < report.rows; ++r) {
    const Row row = source.row(r);
    tokens += row.tokens() - row.padding;
    padding += row.padding;
  }
  EXPECT_EQ(report.documents, 90);
  EXPECT_EQ(report.tokens, tokens);
  EXPECT_EQ(report.padding, padding);
  EXPECT_EQ(report.too_long, 0);
}

TEST(RowSource, RowsDoNotDependOnTheOrderOfAsking) {
  const Shards shards;
  const RowSource forward(shards.options(97));
  const RowSource backward(shards.options(97));
  const std::int64_t rows = 4 * forward.report().rows;  // four epochs, more than plans are cached
  std::vector<Row> expected;
  for (std::int64_t r = 0; r < rows; ++r) {
    expected.push_back(forward.row(r));
  }
  for (std::int64_t r = rows; r-- > 0;) {
    EXPECT_TRUE(equal(backward.row(r), expected[static_cast<std::size_t>(r)])) << r;
  }
  for (const std::int64_t r : {std::int64_t{0}, rows - 1, std::int64_t{1}, rows / 2}) {
    EXPECT_TRUE(equal(forward.row(r), expected[static_cast<std::size_t>(r)])) << r;
  }
}

TEST(RowSource, EpochsAndSeedsHaveOrdersOfTheirOwn) {
  const Shards shards;
  RowSourceOptions options = shards.options(97);
  const RowSource source(options);
  EXPECT_FALSE(equal(source.row(0), source.row(source.report().rows)));
  options.seed = 4;
  EXPECT_FALSE(equal(source.row(0), RowSource(options).row(0)));
}

TEST(RowSource, KeepFollowsTheMaskOrHoldsForAllButPadding) {
  const Shards shards;
  RowSourceOptions options = shards.options(97);
  const Row all = RowSource(options).row(0);
  options.keep = Keep::assistant;
  const Row assistant = RowSource(options).row(0);
  EXPECT_EQ(all.ids, assistant.ids);
  for (std::int64_t t = 0; t < all.tokens() - all.padding; ++t) {
    const auto i = static_cast<std::size_t>(t);
    EXPECT_EQ(all.keep[i], 1);
    EXPECT_EQ(assistant.keep[i], (t - assistant.start[i]) % 3 == 0 ? 1 : 0);
  }
}

TEST(RowSource, LongDocumentsAreCutIntoPieces) {
  const Shards shards;
  const RowSource source(shards.options(16));
  const auto too_long = std::ranges::count_if(shards.documents, [](const auto& entry) {
    return entry.first < 90 && entry.second.size() > 16;
  });
  EXPECT_EQ(source.report().too_long, too_long);
  std::vector<std::int32_t> seen;
  for (std::int64_t r = 0; r < source.report().rows; ++r) {
    for (const auto& piece : split_row(source.row(r))) {
      seen.insert(seen.end(), piece.begin(), piece.end());
    }
  }
  std::vector<std::int32_t> wanted;
  for (const auto& [number, ids] : shards.documents) {
    if (number < 90) {
      wanted.insert(wanted.end(), ids.begin(), ids.end());
    }
  }
  std::ranges::sort(seen);
  std::ranges::sort(wanted);
  EXPECT_EQ(seen, wanted);
}

TEST(RowSource, HeldOutDocumentsStayApart) {
  const Shards shards;
  RowSourceOptions options = shards.options(97);
  options.split = Split::held_out;
  const RowSource source(options);
  EXPECT_EQ(source.report().documents, 5);
  for (const auto& document : split_row(source.row(0))) {
    EXPECT_GE(document[0], 90);
  }
  options.paths = {shards.path("train-00000.h5")};
  EXPECT_THROW(RowSource{options}, Error);
}

TEST(RowSource, UnfitShardsAreRefused) {
  Shards shards;
  const auto fault = [](const RowSourceOptions& options) -> std::string {
    try {
      const RowSource source(options);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  RowSourceOptions options = shards.options(97);
  EXPECT_EQ(fault(options), "");
  options.vocabulary = 3000;
  options.pad_id = 0;
  EXPECT_NE(fault(options).find("but the model's vocabulary is 3000"), std::string::npos);
  options = shards.options(0);
  EXPECT_NE(fault(options).find("data.row_tokens"), std::string::npos);
  options = shards.options(97);
  options.paths = {};
  EXPECT_NE(fault(options).find("data.train"), std::string::npos);
  options.paths = {shards.path("nothing")};
  EXPECT_NE(fault(options).find("no file"), std::string::npos);
  shards.write("train-00002.h5", Split::train, 100, 110, vocabulary_hash(kVocabulary + 1));
  EXPECT_NE(fault(shards.options(97)).find("different vocabularies"), std::string::npos);
}

}  // namespace
}  // namespace bifocal
