// Merges in short and long pieces against the definition.
#include "data/bpe_merge.h"

#include <map>

#include <gtest/gtest.h>

#include "core/random.h"

namespace bifocal {
namespace {

using Ids = std::vector<std::int32_t>;
using Pairs = std::map<std::pair<std::int32_t, std::int32_t>, Merge>;

// Searches all pairs again for each merge.
Ids merged_by_definition(const Pairs& pairs, Ids ids) {
  for (;;) {
    std::size_t best = 0;
    const Merge* merge = nullptr;
    for (std::size_t i = 0; i + 1 < ids.size(); ++i) {
      const auto found = pairs.find({ids[i], ids[i + 1]});
      if (found != pairs.end() && (merge == nullptr || found->second.rank < merge->rank)) {
        best = i;
        merge = &found->second;
      }
    }
    if (merge == nullptr) {
      return ids;
    }
    ids[best] = merge->id;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
}

TEST(BpeMerge, AgreesWithTheDefinition) {
  MergeScratch scratch;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    std::uint64_t index = 0;
    const auto next = [&] { return random_bits(seed, 0, index++); };
    const auto draw = [&](std::int32_t below) {
      return static_cast<std::int32_t>(next() % static_cast<std::uint64_t>(below));
    };
    Pairs pairs;
    for (std::int32_t id = 4; id < 30; ++id) {
      pairs[{draw(id), draw(id)}] = {(id * 7) % 31, id};
    }
    MergeTable table(pairs.size());
    for (const auto& [pair, merge] : pairs) {
      table.insert(pair.first, pair.second, merge);
    }
    Ids ids(static_cast<std::size_t>(draw(200)));
    std::vector<Symbol> symbols;
    for (std::int32_t& id : ids) {
      id = draw(4);
      symbols.push_back({id, static_cast<std::uint32_t>(symbols.size())});
    }
    merge_symbols(table, symbols, scratch);
    Ids got;
    std::uint32_t last = 0;
    for (const Symbol& symbol : symbols) {
      got.push_back(symbol.id);
      EXPECT_TRUE(got.size() == 1 ? symbol.begin == 0 : symbol.begin > last);
      last = symbol.begin;
    }
    EXPECT_EQ(got, merged_by_definition(pairs, ids)) << seed;
  }
}

TEST(BpeMerge, LaterMergesOfAPairReplaceEarlierOnes) {
  MergeTable table(2);
  table.insert(1, 2, {0, 3});
  table.insert(1, 2, {5, 4});
  ASSERT_NE(table.find(1, 2), nullptr);
  EXPECT_EQ(table.find(1, 2)->rank, 5);
  EXPECT_EQ(table.find(1, 2)->id, 4);
  EXPECT_EQ(table.find(2, 1), nullptr);
  EXPECT_EQ(MergeTable(0).find(0, 0), nullptr);
}

}  // namespace
}  // namespace bifocal
