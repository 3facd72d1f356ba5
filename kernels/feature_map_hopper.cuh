// Softmax features on Hopper: what their two passes share. Blocks stay for the whole launch: each
// keeps one head's weight in shared memory and goes over every slots-th tile of 64 tokens, so that
// blocks of all heads are about the same tokens at the same time.
#pragma once

#include <algorithm>

#include "kernels/feature_map.cuh"
#include "kernels/mma_tile.cuh"
#include "kernels/warp.cuh"
#include "kernels/wgmma.cuh"

namespace bifocal::hopper {

inline constexpr int kFeatureTokens = kGroupRows;  // of a tile

// Columns of the first two numbers of this thread's sums of eight columns.
__device__ inline int own_column() {
  return lane_id() % 4 * 2;
}

// This thread's first row of its warpgroup's sums; the other is eight further on.
__device__ inline int own_row() {
  return static_cast<int>(threadIdx.x) % kGroupThreads / kWarp * 16 + lane_id() / 4;
}

// A tile of kColumns columns from `column` on of one head's rows from `token` on.
template <int kColumns>
__device__ void load_tokens(
    BFloat16* to, const CUtensorMap& map, Barrier& barrier, int column, int head, int token) {
#pragma unroll
  for (int at = 0; at < kColumns; at += kSwizzleColumns) {
    load_box(to + at * kFeatureTokens, map, barrier, column + at, head, token);
  }
}

// A head's weight, columns from `column` on: a tile of D rows.
template <int D, int kColumns>
__device__ void load_weight(
    BFloat16* to, const CUtensorMap& map, Barrier& barrier, int column, int head) {
#pragma unroll
  for (int at = 0; at < kColumns; at += kSwizzleColumns) {
    load_box(to + at * D, map, barrier, column + at, head * D);
  }
}

// Of [tokens, heads, dim].
inline CUtensorMap map_tokens(const BFloat16* x, std::int64_t tokens, int heads, int dim) {
  return make_tensor_map(
      x,
      {{.size = dim, .stride = 1, .box = kSwizzleColumns},
       {.size = heads, .stride = dim, .box = 1},
       {.size = tokens, .stride = static_cast<std::int64_t>(heads) * dim, .box = kFeatureTokens}});
}

inline CUtensorMap map_weight(const FeatureMapArrays<BFloat16>& a) {
  return make_tensor_map(
      a.weight,
      {{.size = a.dim, .stride = 1, .box = kSwizzleColumns},
       {.size = static_cast<std::int64_t>(a.heads) * a.dim, .stride = a.dim, .box = a.dim}});
}

// The blocks that share the tiles of one of `weights` weights, where the device holds `blocks`.
inline int feature_slots(std::int64_t tokens, int weights, int blocks) {
  const std::int64_t tiles = ceil_div(tokens, kFeatureTokens);
  return static_cast<int>(std::clamp<std::int64_t>(blocks / weights, 1, tiles));
}

}  // namespace bifocal::hopper
