// Packing of documents into rows: every token once, shares of the sources, little padding, any
// order of asking, constant memory.
#include "data/pack.h"

#include <map>
#include <numeric>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/random.h"
#include "data/register_machine.h"
#include "support/document_lengths.h"
#include "support/peak_memory.h"

namespace bifocal {
namespace {

using test::ListedLengths;
using test::LogNormalLengths;

// Lengths of register-machine documents with log-uniform step counts, as in training.
ListedLengths register_machine(std::int64_t count) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < count; ++i) {
    lengths.push_back(25 + 21 * draw_steps(5, i, 1, 46));
  }
  return ListedLengths(std::move(lengths));
}

ListedLengths uniform_lengths(std::size_t count, std::uint64_t most, std::uint64_t seed) {
  std::vector<std::int64_t> lengths;
  for (std::uint64_t i = 0; i < count; ++i) {
    lengths.push_back(1 + static_cast<std::int64_t>(random_below(most, seed, 2, i)));
  }
  return ListedLengths(std::move(lengths));
}

// What a corpus of chat, code, mathematics, science and safety texts looks like.
struct Corpus {
  LogNormalLengths chat{1000000, {.mean = 1000, .sigma = 1.0, .least = 10}, 2};
  LogNormalLengths code{500000, {.mean = 3000, .sigma = 1.5, .least = 20}, 3};
  LogNormalLengths math{800000, {.mean = 600, .sigma = 0.7, .least = 30}, 4};
  LogNormalLengths science{100000, {.mean = 8000, .sigma = 1.0, .least = 100}, 5};
  LogNormalLengths safety{2000, {.mean = 250, .sigma = 0.6, .least = 10}, 6};

  std::vector<PackSource> sources() {
    return {{"chat", 40, &chat},
            {"code", 20, &code},
            {"math", 20, &math},
            {"science", 15, &science},
            {"safety", 5, &safety}};
  }
};

RowPacker one_source(DocumentLengths& lengths, std::int64_t row_tokens, std::uint64_t seed = 3) {
  return RowPacker({{"one", 1.0, &lengths}},
                   {.row_tokens = row_tokens, .seed = seed, .whole_epochs = true});
}

double share(std::int64_t part, std::int64_t whole) {
  return static_cast<double>(part) / static_cast<double>(whole);
}

// Pieces by document and begin, as they are collected row by row.
using Cover = std::map<std::int64_t, std::map<std::int64_t, std::int64_t>>;

void expect_whole(const Cover& cover, const std::vector<std::int64_t>& lengths) {
  ASSERT_EQ(cover.size(), lengths.size());
  for (const auto& [document, parts] : cover) {
    std::int64_t reached = 0;
    for (const auto& [begin, length] : parts) {
      EXPECT_EQ(begin, reached);
      reached += length;
    }
    EXPECT_EQ(reached, lengths[static_cast<std::size_t>(document)]);
  }
}

TEST(Pack, EveryTokenOfAnEpochLiesInOneRow) {
  ListedLengths lengths = uniform_lengths(500, 300, 1);
  const std::int64_t tokens =
      std::accumulate(lengths.all().begin(), lengths.all().end(), std::int64_t{0});
  for (const std::int64_t row_tokens : {1, 7, 97, 128, 299, 5000}) {
    RowPacker packer = one_source(lengths, row_tokens);
    for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
      Cover cover;
      std::int64_t covered = 0;
      while (covered < tokens) {
        const RowPlan row = packer.next();
        ASSERT_EQ(row.after.sources[0].epoch, epoch);
        std::int64_t used = 0;
        for (const Piece& piece : row.pieces) {
          EXPECT_TRUE(cover[piece.document].emplace(piece.begin, piece.length).second);
          used += piece.length;
        }
        EXPECT_GE(used, 1);
        EXPECT_EQ(used + row.padding, row_tokens);
        covered += used;
      }
      expect_whole(cover, lengths.all());
      EXPECT_EQ(packer.counts().tokens(), (epoch + 1) * tokens);
      EXPECT_EQ(packer.counts().sources[0].documents, (epoch + 1) * 500);
    }
  }
}

TEST(Pack, EveryTokenOfEachSourcesEpochsLiesInOneRowOfAMixture) {
  ListedLengths small = uniform_lengths(20, 50, 1);
  ListedLengths large = uniform_lengths(700, 400, 2);
  RowPacker packer({{"small", 1, &small}, {"large", 3, &large}}, {.row_tokens = 128, .seed = 1});
  // Pieces of a source's epochs follow one another, however the sources are mixed.
  std::map<std::int64_t, std::vector<Piece>> by_source;
  while (packer.counts().sources[1].epoch < 2) {
    const RowPlan row = packer.next();
    EXPECT_EQ(row.position + 1, packer.counts().rows);
    for (const Piece& piece : row.pieces) {
      by_source[piece.source].push_back(piece);
    }
  }
  for (const auto& [source, all] : std::map<std::int64_t, const std::vector<std::int64_t>*>{
           {0, &small.all()}, {1, &large.all()}}) {
    const std::int64_t tokens = std::accumulate(all->begin(), all->end(), std::int64_t{0});
    Cover cover;
    std::int64_t covered = 0;
    std::int64_t epochs = 0;
    for (const Piece& piece : by_source[source]) {
      EXPECT_TRUE(cover[piece.document].emplace(piece.begin, piece.length).second);
      covered += piece.length;
      if (covered == tokens) {
        expect_whole(cover, *all);
        cover.clear();
        covered = 0;
        ++epochs;
      }
    }
    EXPECT_GE(epochs, source == 0 ? 5 : 2);
  }
}

// Every document once before any comes again, rows of their own for each epoch, and the weights
// hold while all sources have documents.
TEST(Pack, WholeEpochsOfAMixtureEndTogether) {
  ListedLengths small = uniform_lengths(60, 50, 1);
  ListedLengths large = uniform_lengths(3000, 100, 2);
  RowPacker packer({{"small", 1, &small}, {"large", 1, &large}},
                   {.row_tokens = 128, .seed = 1, .whole_epochs = true});
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    std::map<std::int64_t, Cover> cover;
    std::map<std::int64_t, std::int64_t> early;  // tokens of the epoch's first rows
    std::int64_t covered = 0;
    const std::int64_t tokens =
        std::accumulate(small.all().begin(), small.all().end(), std::int64_t{0}) +
        std::accumulate(large.all().begin(), large.all().end(), std::int64_t{0});
    for (int row = 0; covered < tokens; ++row) {
      const RowPlan plan = packer.next();
      ASSERT_EQ(plan.after.sources[0].epoch, epoch);
      ASSERT_EQ(plan.after.sources[1].epoch, epoch);
      for (const Piece& piece : plan.pieces) {
        EXPECT_TRUE(cover[piece.source][piece.document].emplace(piece.begin, piece.length).second);
        early[piece.source] += row < 15 ? piece.length : 0;
        covered += piece.length;
      }
    }
    expect_whole(cover[0], small.all());
    expect_whole(cover[1], large.all());
    EXPECT_NEAR(share(early[0], early[0] + early[1]), 0.5, 0.1);  // a row ahead is 1 / 15
  }
}

TEST(Pack, OnlyTheRestOfALongDocumentSharesARow) {
  ListedLengths lengths({25, 5, 10});
  RowPacker packer = one_source(lengths, 10);
  for (int row = 0; row < 4;
       ++row) {  // 10 + 10 of the first, its rest of 5 with the second, the third
    const RowPlan plan = packer.next();
    EXPECT_EQ(plan.padding, 0);
    EXPECT_EQ(plan.after.sources[0].epoch, 0);
  }
  EXPECT_EQ(packer.counts().sources[0].cut, 1);
  EXPECT_EQ(packer.next().after.sources[0].epoch, 1);
}

TEST(Pack, LongDocumentsAreKeptOutAndCounted) {
  ListedLengths lengths({25, 5, 10, 11});
  RowPacker packer({{"one", 1.0, &lengths}},
                   {.row_tokens = 10, .seed = 1, .long_documents = LongDocuments::drop});
  for (int row = 0; row < 2; ++row) {
    for (const Piece& piece : packer.next().pieces) {
      EXPECT_TRUE(piece.document == 1 || piece.document == 2);
    }
  }
  packer.next();
  EXPECT_EQ(packer.counts().sources[0].dropped % 2, 0);
  EXPECT_GE(packer.counts().sources[0].dropped, 2);
  EXPECT_EQ(packer.counts().sources[0].dropped_tokens, packer.counts().sources[0].dropped / 2 * 36);
  EXPECT_EQ(packer.counts().sources[0].cut, 0);
}

TEST(Pack, ASourceOfLongDocumentsAloneIsRefused) {
  ListedLengths lengths({25, 11});
  ListedLengths others({3});
  const PackOptions options{.row_tokens = 10, .seed = 1, .long_documents = LongDocuments::drop};
  for (RowPacker packer :
       {RowPacker({{"long ones", 1.0, &lengths}}, options),
        RowPacker({{"others", 1.0, &others}, {"long ones", 1.0, &lengths}}, options)}) {
    RowSequence sequence(packer);
    for (int attempt = 0; attempt < 2; ++attempt) {  // it stays refused
      try {
        sequence.row(3);
        FAIL();
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("every document of long ones is longer"),
                  std::string::npos);
      }
    }
  }
}

TEST(Pack, BadWeightsAreRefused) {
  ListedLengths lengths({3});
  for (const double weight : {-1.0, 0.0, std::nan(""), HUGE_VAL}) {
    EXPECT_THROW(RowPacker({{"one", weight, &lengths}}, {.row_tokens = 10}), Error) << weight;
  }
}

TEST(Pack, PaddingIsSmallOnRegisterMachineLengths) {
  ListedLengths lengths = register_machine(4000);
  RowPacker packer = one_source(lengths, 1024, 11);
  while (packer.counts().sources[0].epoch < 3) {
    packer.next();
  }
  EXPECT_LT(share(packer.counts().padding, 1024 * packer.counts().rows), 0.02);
}

TEST(Pack, PaddingIsSmallOnLengthsOfAMixedCorpus) {
  for (const std::int64_t row_tokens : {1024, 4096, 40960}) {
    Corpus corpus;
    for (const PackSource& source : corpus.sources()) {
      if (source.lengths->documents() < 10000) {
        continue;  // an epoch of a few rows, the last of them only partly filled
      }
      RowPacker packer = one_source(*source.lengths, row_tokens);
      for (int row = 0; row < 300; ++row) {
        packer.next();
      }
      EXPECT_LT(share(packer.counts().padding, 300 * row_tokens), 0.02)
          << source.name << " " << row_tokens;
    }
    RowPacker packer(corpus.sources(), {.row_tokens = row_tokens, .seed = 1});
    for (int row = 0; row < 1000; ++row) {
      packer.next();
    }
    EXPECT_LT(share(packer.counts().padding, 1000 * row_tokens), 0.02) << row_tokens;
  }
}

TEST(Pack, SharesOfTheTokensFollowTheWeights) {
  for (const std::int64_t row_tokens : {1024, 40960}) {
    Corpus corpus;
    const std::vector<PackSource> sources = corpus.sources();
    RowPacker packer(sources, {.row_tokens = row_tokens, .seed = 1});
    for (int row = 0; row < 1000; ++row) {
      packer.next();
    }
    for (std::size_t i = 0; i < sources.size(); ++i) {
      const SourceCounts& counts = packer.counts().sources[i];
      EXPECT_NEAR(100.0 * share(counts.tokens, packer.counts().tokens()), sources[i].weight, 0.5)
          << sources[i].name << " " << row_tokens;
    }
  }
}

// Documents of one token, of exactly a row, of many rows, and a source of one document.
TEST(Pack, SharesOfTheTokensFollowTheWeightsOfExtremeSources) {
  ListedLengths tiny(std::vector<std::int64_t>(50000, 1));
  ListedLengths whole_rows(std::vector<std::int64_t>(30, 512));
  ListedLengths books({100000, 70001, 1234567});
  ListedLengths single({17});
  ListedLengths never({5});
  const std::vector<PackSource> sources = {{"tiny", 0.1, &tiny},
                                           {"whole rows", 0.3, &whole_rows},
                                           {"books", 0.55, &books},
                                           {"single", 0.05, &single},
                                           {"never", 0.0, &never}};
  RowPacker packer(sources, {.row_tokens = 512, .seed = 1});
  for (int row = 0; row < 1000; ++row) {
    packer.next();
  }
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const SourceCounts& counts = packer.counts().sources[i];
    EXPECT_NEAR(share(counts.tokens, packer.counts().tokens()), sources[i].weight, 0.005)
        << sources[i].name;
  }
  EXPECT_EQ(packer.counts().sources[4].tokens, 0);
  // The one document of a source is an epoch of it.
  EXPECT_GT(packer.counts().sources[3].documents, 1400);
  EXPECT_NEAR(static_cast<double>(packer.counts().sources[3].epoch),
              static_cast<double>(packer.counts().sources[3].documents),
              1.0);
}

std::vector<Piece> pieces_of(RowPacker packer, int rows) {
  std::vector<Piece> pieces;
  for (int row = 0; row < rows; ++row) {
    const RowPlan plan = packer.next();
    pieces.insert(pieces.end(), plan.pieces.begin(), plan.pieces.end());
  }
  return pieces;
}

TEST(Pack, DependsOnSeedAndEpochAlone) {
  ListedLengths lengths = register_machine(300);
  const auto first = pieces_of(one_source(lengths, 1024, 1), 20);
  EXPECT_EQ(first, pieces_of(one_source(lengths, 1024, 1), 20));
  EXPECT_NE(first, pieces_of(one_source(lengths, 1024, 2), 20));
  RowPacker packer = one_source(lengths, 1024, 1);
  RowPlan row = packer.next();
  while (row.after.sources[0].epoch == 0) {
    row = packer.next();
  }
  EXPECT_NE(row.pieces, one_source(lengths, 1024, 1).next().pieces);
}

// A source's documents come in the same order whatever it is mixed with.
TEST(Pack, ASourcesOrderDoesNotDependOnTheOthers) {
  ListedLengths lengths = uniform_lengths(100, 300, 1);
  DocumentOrder alone(lengths, "chat", 1);
  DocumentOrder other(lengths, "code", 1);
  std::int64_t equal = 0;
  std::set<std::int64_t> seen;
  for (std::int64_t place = 0; place < 100; ++place) {
    const auto document = alone.at(0, place);
    EXPECT_EQ(document.length, lengths.all()[static_cast<std::size_t>(document.number)]);
    EXPECT_TRUE(seen.insert(document.number).second);
    equal += document.number == other.at(0, place).number ? 1 : 0;
  }
  EXPECT_LT(equal, 10);
}

TEST(Pack, RowsOfManyShortDocumentsAreSpreadOverTheEpoch) {
  ListedLengths lengths = register_machine(4000);
  RowPacker packer = one_source(lengths, 1024, 4);
  std::vector<double> pieces;
  for (RowPlan row = packer.next(); row.after.sources[0].epoch == 0; row = packer.next()) {
    pieces.push_back(static_cast<double>(row.pieces.size()));
  }
  const auto half = pieces.begin() + std::ssize(pieces) / 2;
  const double first_half = std::accumulate(pieces.begin(), half, 0.0);
  const double second_half = std::accumulate(half, pieces.end(), 0.0);
  EXPECT_NEAR(first_half / second_half, 1.0, 0.1);
}

TEST(RowSequence, GivesTheSameRowsInAnyOrder) {
  Corpus corpus;
  const PackOptions options{.row_tokens = 4096, .seed = 2};
  RowSequence forward(RowPacker(corpus.sources(), options));
  constexpr std::int64_t kRows = 5000;  // snapshots are thinned out twice on the way
  std::vector<RowPlan> plans;
  for (std::int64_t row = 0; row < kRows; ++row) {
    plans.push_back(forward.row(row));
  }
  const auto expect_row = [&](RowSequence& sequence, std::int64_t position) {
    const RowPlan& plan = sequence.row(position);
    const RowPlan& wanted = plans[static_cast<std::size_t>(position)];
    EXPECT_EQ(plan.position, position);
    EXPECT_EQ(plan.pieces, wanted.pieces) << position;
    EXPECT_EQ(plan.padding, wanted.padding);
    EXPECT_EQ(plan.after, wanted.after);
  };
  RowSequence backward(RowPacker(corpus.sources(), options));
  for (std::int64_t row = kRows - 1; row >= 0; row -= 37) {
    expect_row(backward, row);
  }
  RowSequence far_first(RowPacker(corpus.sources(), options));
  expect_row(far_first, kRows - 1);
  for (std::uint64_t i = 0; i < 300; ++i) {
    expect_row(far_first, static_cast<std::int64_t>(random_below(kRows, 1, 2, i)));
    expect_row(forward, static_cast<std::int64_t>(random_below(kRows, 3, 4, i)));
  }
  EXPECT_EQ(far_first.counts(0), PackCounts{.sources = std::vector<SourceCounts>(5)});
  EXPECT_EQ(far_first.counts(700), plans[699].after);
}

// Fails a while in the middle of a row, as a disk does.
class FailingLengths final : public DocumentLengths {
 public:
  std::int64_t documents() const override { return 10000; }

  void read(std::int64_t first, std::span<std::int64_t> out) override {
    BIFOCAL_REQUIRE(!fails, "[test] no lengths from {} on", first);
    std::ranges::fill(out, 100);
  }

  bool fails = false;
};

TEST(RowSequence, GoesOnRightlyAfterAnError) {
  FailingLengths lengths;
  RowSequence whole(one_source(lengths, 1000));
  RowSequence broken(one_source(lengths, 1000));
  broken.row(10);
  lengths.fails = true;
  EXPECT_THROW(broken.row(900), Error);
  lengths.fails = false;
  for (const std::int64_t position : {900, 10, 0}) {
    EXPECT_EQ(broken.row(position).pieces, whole.row(position).pieces);
  }
}

// 5 x 10^7 documents take no more memory than 10^4: a list of offsets would take 400 MB.
TEST(RowSequence, MemoryDoesNotGrowWithTheNumberOfDocuments) {
  const auto growth = [](std::int64_t documents) {
    LogNormalLengths lengths(documents, {.mean = 1000, .sigma = 1.0}, 1);
    const test::PeakMemory memory;
    RowSequence sequence(one_source(lengths, 4096));
    sequence.row(2000);
    sequence.row(1000);
    return memory.grown();
  };
  const auto few = growth(10000);
  const auto many = growth(50000000);
  if (!few || !many) {
    GTEST_SKIP() << "the system does not tell the peak of memory";
  }
  EXPECT_LT(*many - *few, 8 << 20);
}

// Lengths are read in batches: few reads while the documents of a batch lie close together, and
// where they do not, one for each document.
TEST(RowSequence, ReadsLengthsInBatches) {
  LogNormalLengths lengths(100000, {.mean = 100, .sigma = 0.5}, 1);
  RowSequence sequence(one_source(lengths, 40960));
  const std::int64_t drawn = sequence.counts(200).sources[0].documents;
  EXPECT_GT(drawn, 70000);
  EXPECT_LT(lengths.reads(), 2000);
  EXPECT_LT(lengths.entries(), 20 * drawn);
}

}  // namespace
}  // namespace bifocal
