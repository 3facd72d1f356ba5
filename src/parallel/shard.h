// Contiguous shards: n things cut over P ranks so that shares differ by at most one.
#pragma once

#include <cstdint>

namespace bifocal {

// Indices [begin, end).
struct ShardRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t size() const { return end - begin; }

  bool operator==(const ShardRange&) const = default;
};

// The share of rank `rank`; the first n mod ranks shares are one longer. Wants 0 <= rank < ranks.
ShardRange shard_range(std::int64_t n, int ranks, int rank);

// The rank whose share holds index i. Wants 0 <= i < n.
int shard_owner(std::int64_t n, int ranks, std::int64_t i);

// What both ranges hold; an empty range where they do not meet.
ShardRange intersection(const ShardRange& a, const ShardRange& b);

}  // namespace bifocal
