// Rows read from token shards.
#include "data/row_source.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/file.h"
#include "core/random.h"
#include "data/token_file.h"
#include "support/peak_memory.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

constexpr std::int64_t kVocabulary = 5000;
constexpr std::int32_t kPad = 4999;

Mixture one(const std::vector<std::string>& paths) {
  return {{{.name = "data", .paths = paths}}};
}

constexpr std::int64_t kMany = 1000000;

// Rows of the first epoch.
std::int64_t epoch_rows(const RowSource& source) {
  return source.rows_without_repeats(kMany);
}

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
    options.mixture = one({directory_.path()});
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

// Documents and pieces in the order of the rows, as many as the first epoch's tokens.
std::vector<std::vector<std::int32_t>> first_epoch(const RowSource& source) {
  std::vector<std::vector<std::int32_t>> pieces;
  std::int64_t tokens = 0;
  for (std::int64_t r = 0; tokens < source.sources()[0].tokens; ++r) {
    for (auto& piece : split_row(source.row(r))) {
      if (tokens < source.sources()[0].tokens) {
        tokens += std::ssize(piece);
        pieces.push_back(std::move(piece));
      }
    }
  }
  EXPECT_EQ(tokens, source.sources()[0].tokens);
  return pieces;
}

TEST(RowSource, AnEpochHoldsEveryTrainDocumentOnce) {
  const Shards shards;
  const RowSource source(shards.options(97));
  std::vector<std::int32_t> order;  // of the documents, by their first id
  for (std::int64_t position = 0; order.size() < 270; ++position) {
    for (const auto& document : split_row(source.row(position))) {
      EXPECT_EQ(document, shards.documents.at(document[0]));
      order.push_back(document[0]);
    }
    EXPECT_EQ(position < epoch_rows(source), order.size() <= 90);
  }
  for (auto begin = order.begin(); begin != order.begin() + 270; begin += 90) {
    EXPECT_EQ(std::set<std::int32_t>(begin, begin + 90).size(), 90U);
    EXPECT_EQ(*std::max_element(begin, begin + 90), 89);
  }
}

TEST(RowSource, CountsAreThoseOfTheRows) {
  const Shards shards;
  const RowSource source(shards.options(97));
  ASSERT_EQ(source.sources().size(), 1U);
  const SourceSize& size = source.sources()[0];
  EXPECT_EQ(size.documents, 90);
  EXPECT_EQ(size.shards, 2);
  EXPECT_EQ(size.weight, 1.0);
  std::int64_t tokens = 0;
  std::int64_t padding = 0;
  std::int64_t documents = 0;
  constexpr std::int64_t kRows = 100;  // more than three epochs
  for (std::int64_t r = 0; r < kRows; ++r) {
    EXPECT_EQ(source.counts(r).tokens(), tokens);
    const Row row = source.row(r);
    tokens += row.tokens() - row.padding;
    padding += row.padding;
    documents += std::ssize(split_row(row));
  }
  const PackCounts counts = source.counts(kRows);
  EXPECT_EQ(counts.rows, kRows);
  EXPECT_EQ(counts.tokens(), tokens);
  EXPECT_EQ(counts.padding, padding);
  EXPECT_EQ(counts.sources[0].documents, documents);
  EXPECT_EQ(counts.sources[0].cut, 0);
  EXPECT_EQ(counts.sources[0].epoch, documents / 90);
  EXPECT_EQ(size.epochs(counts.sources[0]),
            static_cast<double>(tokens) / static_cast<double>(size.tokens));
  const std::vector<std::int64_t> lengths = source.length_histogram(0);
  for (std::size_t power = 0; power < lengths.size(); ++power) {
    EXPECT_EQ(lengths[power], std::ranges::count_if(shards.documents, [&](const auto& entry) {
                return entry.first < 90 && entry.second.size() >> power == 1;
              }));
  }
}

TEST(RowSource, RowsDoNotDependOnTheOrderOfAsking) {
  const Shards shards;
  const RowSource forward(shards.options(97));
  const RowSource backward(shards.options(97));
  const std::int64_t rows = 4 * epoch_rows(forward);
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

TEST(RowSource, SeveralThreadsReadTheSameRows) {
  const Shards shards;
  const RowSource alone(shards.options(97));
  const RowSource shared(shards.options(97));
  constexpr std::int64_t kRows = 60;
  std::array<std::vector<Row>, 4> read;
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < read.size(); ++t) {
    threads.emplace_back([&shared, &rows = read[t], backward = t % 2 == 1] {
      for (std::int64_t r = 0; r < kRows; ++r) {
        rows.push_back(shared.row(backward ? kRows - 1 - r : r));
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (std::int64_t r = 0; r < kRows; ++r) {
    const Row wanted = alone.row(r);
    for (std::size_t t = 0; t < read.size(); ++t) {
      EXPECT_TRUE(equal(read[t][static_cast<std::size_t>(t % 2 == 1 ? kRows - 1 - r : r)], wanted));
    }
  }
}

TEST(RowSource, EpochsAndSeedsHaveOrdersOfTheirOwn) {
  const Shards shards;
  RowSourceOptions options = shards.options(97);
  const RowSource source(options);
  EXPECT_FALSE(equal(source.row(0), source.row(epoch_rows(source))));
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
  EXPECT_EQ(source.counts(epoch_rows(source)).sources[0].cut, too_long);
  std::vector<std::int32_t> seen;
  for (const auto& piece : first_epoch(source)) {
    EXPECT_LE(piece.size(), 16U);
    seen.insert(seen.end(), piece.begin(), piece.end());
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

TEST(RowSource, LongDocumentsAreKeptOut) {
  const Shards shards;
  RowSourceOptions options = shards.options(16);
  options.long_documents = LongDocuments::drop;
  const RowSource source(options);
  std::set<std::int32_t> seen;
  for (std::int64_t r = 0; r <= epoch_rows(source); ++r) {
    for (const auto& document : split_row(source.row(r))) {
      EXPECT_EQ(document, shards.documents.at(document[0]));
      seen.insert(document[0]);
    }
  }
  for (const auto& [number, ids] : shards.documents) {
    EXPECT_EQ(seen.contains(number), number < 90 && ids.size() <= 16) << number;
  }
}

TEST(RowSource, SourcesAreMixedByTheirWeights) {
  const Shards shards;
  RowSourceOptions options = shards.options(97);
  options.mixture = {{{.name = "first", .paths = {shards.path("train-00000.h5")}, .weight = 3},
                      {.name = "second", .paths = {shards.path("train-00001.h5")}, .weight = 1}}};
  const RowSource source(options);
  std::array<std::int64_t, 2> tokens{};
  constexpr std::int64_t kRows = 1000;
  for (std::int64_t r = 0; r < kRows; ++r) {
    for (const auto& document : split_row(source.row(r))) {
      ASSERT_EQ(document, shards.documents.at(document[0]));
      tokens[document[0] < 40 ? 0 : 1] += std::ssize(document);
    }
  }
  EXPECT_NEAR(
      static_cast<double>(tokens[0]) / static_cast<double>(tokens[0] + tokens[1]), 0.75, 0.005);
  const PackCounts counts = source.counts(kRows);
  EXPECT_EQ(counts.sources[0].tokens, tokens[0]);
  EXPECT_EQ(counts.sources[1].tokens, tokens[1]);
  EXPECT_GT(source.rows_without_repeats(kMany), 5);
  EXPECT_LT(source.rows_without_repeats(kMany), 40);
  EXPECT_EQ(source.sources()[0].weight, 0.75);
}

// More shards than are open at once, read all over the place.
TEST(RowSource, ManyShardsAreReadWithFewOpen) {
  Shards shards;
  for (std::int32_t i = 0; i < 60; ++i) {
    shards.write("train-9" + std::to_string(i) + ".h5", Split::train, 100 + 2 * i, 102 + 2 * i);
  }
  const RowSource source(shards.options(97));
  EXPECT_EQ(source.sources()[0].shards, 62);
  std::set<std::int32_t> seen;
  for (const auto& document : first_epoch(source)) {
    EXPECT_EQ(document, shards.documents.at(document[0]));
    EXPECT_TRUE(seen.insert(document[0]).second);
  }
  EXPECT_EQ(seen.size(), 210U);
  std::int64_t open = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    const auto target = std::filesystem::read_symlink(entry.path(), ignored).string();
    open += target.starts_with(shards.path("")) ? 1 : 0;
  }
  EXPECT_GT(open, 0);
  EXPECT_LE(open, 32);
}

// Offsets and lengths of 2 x 10^6 documents would take 32 MB.
TEST(RowSource, MemoryDoesNotGrowWithTheNumberOfDocuments) {
  const test::TemporaryDirectory directory;
  const auto growth = [&](std::int64_t documents) {
    const std::string path = directory.path(std::to_string(documents) + ".h5");
    {
      TokenFileWriter writer({kVocabulary, vocabulary_hash(kVocabulary), Split::train});
      const std::vector<std::int32_t> ids = {1, 2, 3, 4};
      const std::vector<std::uint8_t> keep(4, 1);
      for (std::int64_t i = 0; i < documents; ++i) {
        writer.append(std::span(ids).first(1 + static_cast<std::size_t>(i % 4)),
                      std::span(keep).first(1 + static_cast<std::size_t>(i % 4)));
      }
      writer.write(path);
    }
    const test::PeakMemory memory;
    RowSourceOptions options{.mixture = one({path}), .row_tokens = 64, .vocabulary = kVocabulary};
    const RowSource source(options);
    for (const std::int64_t position : {0, 20, 100, 50}) {
      EXPECT_EQ(source.row(position).padding, 0);
    }
    return memory.grown();
  };
  growth(1000);  // the library's own first needs
  const auto few = growth(10000);
  const auto many = growth(2000000);
  if (!few || !many) {
    GTEST_SKIP() << "the system does not tell the peak of memory";
  }
  EXPECT_LT(*many - *few, 8 << 20);
}

TEST(RowSource, AShardThatChangesWhileItIsReadIsRefused) {
  Shards shards;
  for (std::int32_t i = 0; i < 40; ++i) {
    shards.write("train-9" + std::to_string(i) + ".h5", Split::train, 100 + 2 * i, 102 + 2 * i);
  }
  const RowSource source(shards.options(97));
  const std::string bytes = read_file(shards.path("train-910.h5"));
  shards.write("train-910.h5", Split::train, 300, 340);
  std::string fault;
  try {
    for (std::int64_t r = 0; r < 100; ++r) {
      source.row(r);
    }
  } catch (const Error& error) {
    fault = error.what();
  }
  EXPECT_NE(fault.find("train-910.h5 is not the shard that it was"), std::string::npos) << fault;
}

TEST(RowSource, HeldOutDocumentsStayApart) {
  const Shards shards;
  RowSourceOptions options = shards.options(97);
  options.split = Split::held_out;
  const RowSource source(options);
  EXPECT_EQ(source.sources()[0].documents, 5);
  std::size_t documents = 0;
  for (std::int64_t r = 0; r < epoch_rows(source); ++r) {  // each once, in rows of their own
    for (const auto& document : split_row(source.row(r))) {
      EXPECT_GE(document[0], 90);
      ++documents;
    }
  }
  EXPECT_EQ(documents, 5U);
  options.mixture = one({shards.path("train-00000.h5")});
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
  options.mixture = {};
  EXPECT_NE(fault(options).find("data.train"), std::string::npos);
  options.mixture = one({shards.path("nothing")});
  EXPECT_NE(fault(options).find("no file"), std::string::npos);
  std::filesystem::create_directory(shards.path("empty"));
  options.mixture = one({shards.path("empty")});
  EXPECT_NE(fault(options).find("holds no token shard"), std::string::npos);
  options.mixture.sources.push_back({.name = "data", .paths = {shards.path("")}, .weight = -1});
  options.mixture.sources[0].paths = {shards.path("train-00000.h5")};
  EXPECT_NE(fault(options).find("wanted a finite weight"), std::string::npos);
  options = shards.options(97);
  options.pad_id = kVocabulary;
  EXPECT_NE(fault(options).find("padding id"), std::string::npos);
  shards.write("other.h5", Split::train, 100, 110, vocabulary_hash(kVocabulary + 1));
  options = shards.options(97);
  options.mixture = {{{.name = "a", .paths = {shards.path("train-00000.h5")}},
                      {.name = "b", .paths = {shards.path("other.h5")}}}};
  EXPECT_NE(fault(options).find("different vocabularies"), std::string::npos);
  shards.write("train-00002.h5", Split::train, 100, 110, vocabulary_hash(kVocabulary + 1));
  EXPECT_NE(fault(shards.options(97)).find("different vocabularies"), std::string::npos);
}

}  // namespace
}  // namespace bifocal
