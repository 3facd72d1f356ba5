// Contiguous shards.
#include "parallel/shard.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace bifocal {

TEST(Shard, RangesTileAndDifferByAtMostOne) {
  for (std::int64_t n = 0; n <= 23; ++n) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      std::int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const ShardRange range = shard_range(n, ranks, rank);
        EXPECT_EQ(range.begin, next);
        EXPECT_GE(range.size(), n / ranks);
        EXPECT_LE(range.size(), (n + ranks - 1) / ranks);
        for (std::int64_t i = range.begin; i < range.end; ++i) {
          EXPECT_EQ(shard_owner(n, ranks, i), rank);
        }
        next = range.end;
      }
      EXPECT_EQ(next, n);
    }
  }
}

TEST(Shard, HoldsMoreElementsThanAnIntCounts) {
  const std::int64_t n = std::int64_t{1} << 40;
  EXPECT_EQ(shard_range(n, 3, 2).end, n);
  EXPECT_EQ(shard_owner(n, 3, n - 1), 2);
}

TEST(Shard, RefusesRanksAndIndicesOutside) {
  EXPECT_THROW(shard_range(4, 2, 2), Error);
  EXPECT_THROW(shard_owner(4, 2, 4), Error);
}

TEST(Shard, IntersectsRanges) {
  EXPECT_EQ(intersection({2, 8}, {5, 12}), (ShardRange{5, 8}));
  EXPECT_EQ(intersection({2, 4}, {6, 9}).size(), 0);
  EXPECT_EQ(intersection({6, 9}, {2, 4}).size(), 0);
  EXPECT_EQ(intersection({0, 9}, {3, 4}), (ShardRange{3, 4}));
}

}  // namespace bifocal
