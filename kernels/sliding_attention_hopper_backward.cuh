// Backward pass of sliding attention on Hopper: what its kernels share. For bfloat16 and head
// widths 64 and 128.
//
// A tile of query rows is up to 64 rows of whole tokens: tile t of a key-value head has tokens
// t * tokens_of_tile and on; its row r is token r / group of them, head r % group. One box of a
// tensor map per 64 columns brings it. Rows behind `rows_of_tile` or behind the last token are
// zeros with a log-sum-exp of infinity: their probabilities are zeros.
#pragma once

#include <cstdint>

#include "kernels/hopper.cuh"
#include "kernels/sliding_attention.cuh"

namespace bifocal::hopper {

inline constexpr int kConsumers = 2;  // warpgroups that compute
inline constexpr int kBackwardThreads = (kConsumers + 1) * kGroupThreads;
inline constexpr int kProducerRegisters = 24;
inline constexpr int kConsumerRegisters = 240;
inline constexpr int kBlockKeys = kConsumers * kGroupRows;  // of a block of the keys' gradient

// Query rows as the kernels read them, in device memory.
struct BackwardRows {
  int tokens_of_tile, rows_of_tile;
  int tiles;             // of a key-value head, even
  float* statistics;     // [tiles, kv_heads, 2, 64]: lse times log2(e), then d_out . out
  std::int32_t* spans;   // [tiles, 2, 64]: begin, then end of the window's keys of a row; rows that
                         // are none repeat the last token
  int2* pinned_of_pair;  // [tiles / 2]: the pinned keys that two tiles see some of, or null
  int2* tiles_of_keys;   // [ceil(keys / 128), 2]: the query tiles [x, y) that see some of 64 keys

  __host__ __device__ int pairs() const { return tiles / 2; }

  __device__ const float* statistics_of(int tile, int kv_heads, int kv_head) const {
    return statistics + (static_cast<std::int64_t>(tile) * kv_heads + kv_head) * 2 * kGroupRows;
  }

  const __device__ std::int32_t* spans_of(int tile) const {
    return spans + static_cast<std::int64_t>(tile) * 2 * kGroupRows;
  }
};

// The tensors of query rows as boxes of one tile and 64 columns.
inline CUtensorMap map_of_rows(const AttentionArgs<BFloat16>& a,
                               const BackwardRows& rows,
                               const BFloat16* tensor) {
  const std::int64_t width = static_cast<std::int64_t>(a.heads) * a.dim;
  return make_tensor_map(tensor,
                         {{a.dim, 1, kSwizzleColumns},
                          {a.heads, a.dim, a.group},
                          {a.tokens, width, rows.tokens_of_tile}});
}

// The tensors of keys as boxes of `box` keys of one head and 64 columns.
inline CUtensorMap map_of_keys(const AttentionArgs<BFloat16>& a,
                               const BFloat16* tensor,
                               int keys,
                               int box) {
  const std::int64_t width = static_cast<std::int64_t>(a.kv_heads) * a.dim;
  return make_tensor_map(tensor,
                         {{a.dim, 1, kSwizzleColumns}, {a.kv_heads, a.dim, 1}, {keys, width, box}});
}

// All D columns of a box in `rows` rows of shared memory.
template <int D>
__device__ void load_tile(
    BFloat16* to, int rows, const CUtensorMap& map, Barrier& barrier, int head, int row) {
#pragma unroll
  for (int column = 0; column < D; column += kSwizzleColumns) {
    load_box(to + rows * column, map, barrier, column, head, row);
  }
}

template <int D>
__device__ void store_tile(
    const CUtensorMap& map, const BFloat16* from, int rows, int head, int row) {
#pragma unroll
  for (int column = 0; column < D; column += kSwizzleColumns) {
    store_box(map, from + rows * column, column, head, row);
  }
}

// Zeros in the rows of a tile of 64 that no box fills. By the whole block.
template <int D>
__device__ void clear_unused_rows(BFloat16* tile, int rows_of_tile) {
  const int chunks = (kGroupRows - rows_of_tile) * (D / 8);
  for (int i = static_cast<int>(threadIdx.x); i < chunks; i += kBackwardThreads) {
    const int row = rows_of_tile + i / (D / 8);
    BFloat16* at = tile + swizzled_offset(kGroupRows, row, i % (D / 8) * 8);
    *reinterpret_cast<uint4*>(at) = uint4{0, 0, 0, 0};
  }
}

// The warpgroup's sums [64, D] times factor as bfloat16 to a tile in shared memory.
template <int D>
__device__ void put_tile(BFloat16* tile, const float (&sum)[D / 2], float factor) {
  const int row = warp_id() % 4 * 16 + lane_id() / 4;
#pragma unroll
  for (int i = 0; i < D / 4; ++i) {  // eight columns of one of two rows
    const int at = swizzled_offset(kGroupRows, row + i % 2 * 8, i / 2 * 8) + lane_id() % 4 * 2;
    *reinterpret_cast<std::uint32_t*>(tile + at) =
        pack_bfloat16(sum[2 * i] * factor, sum[2 * i + 1] * factor);
  }
}

// Sums of 8 NT columns as the left factor of products.
template <int R>
__device__ void pack_factor(std::uint32_t (&to)[R / 8][4], const float (&from)[R]) {
#pragma unroll
  for (int i = 0; i < R / 2; ++i) {
    to[i / 4][i % 4] = pack_bfloat16(from[2 * i], from[2 * i + 1]);
  }
}

void differentiate_queries(CudaStream& stream,
                           const AttentionArgs<BFloat16>& args,
                           const AttentionGradients<BFloat16>& gradients,
                           const BackwardRows& rows);

// Of the window's keys.
void differentiate_keys(CudaStream& stream,
                        const AttentionArgs<BFloat16>& args,
                        const AttentionGradients<BFloat16>& gradients,
                        const BackwardRows& rows);

}  // namespace bifocal::hopper
