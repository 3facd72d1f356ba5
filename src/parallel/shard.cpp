// Ranges of contiguous shards.
#include "parallel/shard.h"

#include <algorithm>

#include "core/error.h"

namespace bifocal {

ShardRange shard_range(std::int64_t n, int ranks, int rank) {
  BIFOCAL_ASSERT(n >= 0 && 0 <= rank && rank < ranks);
  const std::int64_t share = n / ranks;
  const std::int64_t longer = n % ranks;
  const std::int64_t begin = rank * share + std::min<std::int64_t>(rank, longer);
  return {begin, begin + share + (rank < longer ? 1 : 0)};
}

int shard_owner(std::int64_t n, int ranks, std::int64_t i) {
  BIFOCAL_ASSERT(0 <= i && i < n && ranks > 0);
  const std::int64_t share = n / ranks;
  const std::int64_t longer = n % ranks;
  const std::int64_t first_short = longer * (share + 1);
  return static_cast<int>(i < first_short ? i / (share + 1) : longer + (i - first_short) / share);
}

ShardRange intersection(const ShardRange& a, const ShardRange& b) {
  const std::int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

}  // namespace bifocal
