// Tiles of bfloat16 rows in shared memory, and products of them in the registers of a warp.
//
// A product's result of 16 MT x 8 NT numbers is an array [MT][NT][4], laid out as C of
// multiply_add; as such it is also the left factor of the next product, without a move between
// threads.
#pragma once

#include <cstdint>

#include "kernels/sliding_attention.cuh"
#include "kernels/tensor_core.cuh"
#include "kernels/vector.cuh"
#include "kernels/warp.cuh"

namespace bifocal {

inline constexpr int kChunk = 8;  // elements of a 16-byte chunk
inline constexpr float kLog2OfE = 1.44269504088896341F;
inline constexpr float kLnOf2 = 0.693147180559945309F;

// Where a chunk of a row lies in a tile of rows of D elements: chunks trade places within eight, so
// that the same chunk of eight rows lies in all 32 banks.
template <int D>
__device__ int tile_offset(int row, int chunk) {
  return row * D + (chunk ^ (row & 7)) * kChunk;
}

struct TileCopy {
  BFloat16* to;          // a tile
  const BFloat16* from;  // global rows
};

// Starts the copies of Rows rows to tiles: offset(row) is where a row of D elements begins in each
// `from`, or negative for a row of zeros.
template <int D, int Rows, int Threads, class Offset, class... Copies>
__device__ void load_tiles(const Offset& offset, Copies... copies) {
  constexpr int kChunks = D / kChunk;
  static_assert(Rows * kChunks % Threads == 0);
#pragma unroll 1  // addresses of several copies at once would spill accumulators
  for (int i = 0; i < Rows * kChunks / Threads; ++i) {
    const int at = i * Threads + static_cast<int>(threadIdx.x);
    const int row = at / kChunks;
    const int chunk = at % kChunks;
    const std::int64_t begin = offset(row);
    const std::int64_t from = begin < 0 ? 0 : begin + chunk * kChunk;
    (copy_async(copies.to + tile_offset<D>(row, chunk), copies.from + from, begin >= 0), ...);
  }
}

// c += (16 MT rows of tile a from a_row on) (8 NT rows of tile b)^T
template <int D, int MT, int NT>
__device__ void multiply_rows(float (&c)[MT][NT][4],
                              SharedElements a,
                              int a_row,
                              SharedElements b) {
  const int lane = lane_id();
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    std::uint32_t left[MT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      load_matrices(left[m], a, tile_offset<D>(a_row + m * 16 + lane % 16, 2 * k + lane / 16));
    }
#pragma unroll
    for (int n = 0; n < NT / 2; ++n) {
      std::uint32_t right[4];
      load_matrices(
          right, b, tile_offset<D>(n * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        multiply_add(c[m][2 * n], left[m], right[0], right[1]);
        multiply_add(c[m][2 * n + 1], left[m], right[2], right[3]);
      }
    }
  }
}

// Rows of a tile in the registers of a warp, as the left factor of many products.
template <int D>
struct LeftRows {
  std::uint32_t left[D / 16][4];

  __device__ void load(SharedElements a, int a_row) {
    const int lane = lane_id();
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      load_matrices(left[k], a, tile_offset<D>(a_row + lane % 16, 2 * k + lane / 16));
    }
  }
};

// c += a (8 NT rows of tile b)^T
template <int D, int NT>
__device__ void multiply_rows(float (&c)[1][NT][4], const LeftRows<D>& a, SharedElements b) {
  const int lane = lane_id();
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
#pragma unroll
    for (int n = 0; n < NT / 2; ++n) {
      std::uint32_t right[4];
      load_matrices(
          right, b, tile_offset<D>(n * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
      multiply_add(c[0][2 * n], a.left[k], right[0], right[1]);
      multiply_add(c[0][2 * n + 1], a.left[k], right[2], right[3]);
    }
  }
}

// c += bfloat16(a) (8 NT rows of tile b, 8 DT columns of them from chunk `first` on)
template <int D, int MT, int NT, int DT>
__device__ void multiply_columns(float (&c)[MT][DT][4],
                                 const float (&a)[MT][NT][4],
                                 SharedElements b,
                                 int first) {
  const int lane = lane_id();
#pragma unroll
  for (int k = 0; k < NT / 2; ++k) {
    std::uint32_t left[MT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      left[m][0] = pack_bfloat16(a[m][2 * k][0], a[m][2 * k][1]);
      left[m][1] = pack_bfloat16(a[m][2 * k][2], a[m][2 * k][3]);
      left[m][2] = pack_bfloat16(a[m][2 * k + 1][0], a[m][2 * k + 1][1]);
      left[m][3] = pack_bfloat16(a[m][2 * k + 1][2], a[m][2 * k + 1][3]);
    }
#pragma unroll
    for (int n = 0; n < DT / 2; ++n) {
      std::uint32_t right[4];
      load_matrices_transposed(
          right, b, tile_offset<D>(k * 16 + lane % 16, first + 2 * n + lane / 16));
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        multiply_add(c[m][2 * n], left[m], right[0], right[1]);
        multiply_add(c[m][2 * n + 1], left[m], right[2], right[3]);
      }
    }
  }
}

// The rows of c, times factor[m][half], through the warp's own 16 MT rows of a tile to global
// memory: offset(row of the tile) is where a row begins in `to`, or negative to leave it out. The
// columns are those of chunks `first` to `first` + DT.
template <int D, int MT, int DT, class Offset>
__device__ void store_rows(const float (&c)[MT][DT][4],
                           const float (&factor)[MT][2],
                           BFloat16* tile,
                           int tile_row,
                           int first,
                           BFloat16* to,
                           const Offset& offset) {
  const int lane = lane_id();
#pragma unroll
  for (int m = 0; m < MT; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile_row + m * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int n = 0; n < DT; ++n) {
        const std::uint32_t pair = pack_bfloat16(c[m][n][2 * half] * factor[m][half],
                                                 c[m][n][2 * half + 1] * factor[m][half]);
        BFloat16* at = tile + tile_offset<D>(row, first + n) + lane % 4 * 2;
        *reinterpret_cast<std::uint32_t*>(at) = pair;
      }
    }
  }
  __syncwarp();
  for (int i = lane; i < MT * 16 * DT; i += 32) {
    const int row = tile_row + i / DT;
    const int chunk = first + i % DT;
    const std::int64_t begin = offset(row);
    if (begin >= 0) {
      const auto values = load_vector<kChunk>(tile + tile_offset<D>(row, chunk), 0);
      store_vector<kChunk>(to + begin + chunk * kChunk, 0, values);
    }
  }
}

// The tiles of `Keys` keys that a block of queries goes through: first those of the pinned keys,
// then those of the window. Made by whole warps.
template <int Keys>
class KeyTiles {
 public:
  struct Tile {
    bool is_pinned;
    bool is_full;  // every query of the block sees every key
    KeySpan keys;
  };

  __device__ KeyTiles(const AttentionArgs<BFloat16>& a, int first_token, int last_token)
      : window_{a.key_begin[first_token], a.own() + last_token + 1},
        full_{a.key_begin[last_token], a.own() + first_token + 1} {
    if (a.pinned_k != nullptr) {
      int begin = a.pinned;
      int end = 0;
      for (int token = first_token + lane_id(); token <= last_token; token += 32) {
        const KeySpan span = pinned_span(a, token);
        if (span.begin < span.end) {
          begin = min(begin, span.begin);
          end = max(end, span.end);
        }
      }
      pinned_.begin = __reduce_min_sync(0xffffffffU, begin);
      pinned_.end = max(pinned_.begin, __reduce_max_sync(0xffffffffU, end));
    }
    num_pinned_ = (pinned_.end - pinned_.begin + Keys - 1) / Keys;
    count_ = num_pinned_ + (window_.end - window_.begin + Keys - 1) / Keys;
  }

  __device__ int count() const { return count_; }

  __device__ Tile tile(int index) const {
    if (index < num_pinned_) {
      const int begin = pinned_.begin + index * Keys;
      return {true, false, {begin, min(begin + Keys, pinned_.end)}};
    }
    const int begin = window_.begin + (index - num_pinned_) * Keys;
    const bool is_full = full_.begin <= begin && begin + Keys <= full_.end;
    return {false, is_full, {begin, min(begin + Keys, window_.end)}};
  }

 private:
  KeySpan window_, full_;
  KeySpan pinned_{0, 0};
  int num_pinned_, count_;
};

// A block of packed query rows against its key tiles: what the forward pass and the queries'
// gradient have in common. Spans of the rows lie in shared memory.
template <int D, int Rows, int Keys, int Threads>
struct QueryBlock {
  static constexpr int kSpanBytes = 2 * Rows * static_cast<int>(sizeof(KeySpan));
  static constexpr int kTileBytes = 2 * D * static_cast<int>(sizeof(BFloat16));  // of K and V rows
  static constexpr int kKeyBytes = 2 * Keys * kTileBytes;                        // two stages

  const AttentionArgs<BFloat16>& args;
  int kv_head, first_row;
  BFloat16* keys;            // [2 stages][K, V][Keys][D]
  KeySpan *window, *pinned;  // [Rows]

  __device__ QueryBlock(const AttentionArgs<BFloat16>& a, unsigned char* memory)
      : args(a),
        kv_head(static_cast<int>(blockIdx.x) % a.kv_heads),
        // The last rows see most keys where windows are full: they go first.
        first_row((static_cast<int>(gridDim.x / a.kv_heads) - 1 -
                   static_cast<int>(blockIdx.x) / a.kv_heads) *
                  Rows),
        keys(reinterpret_cast<BFloat16*>(memory)),
        window(reinterpret_cast<KeySpan*>(memory + kKeyBytes)),
        pinned(window + Rows) {
    for (int row = static_cast<int>(threadIdx.x); row < Rows; row += Threads) {
      const int token = min(first_row + row, a.rows() - 1) / a.group;
      window[row] = window_span(a, token);
      if (a.pinned_k != nullptr) {
        pinned[row] = pinned_span(a, token);
      }
    }
  }

  __device__ int first_token() const { return first_row / args.group; }

  __device__ int last_token() const {
    return (min(first_row + Rows, args.rows()) - 1) / args.group;
  }

  __device__ BFloat16* k_tile(int index) const { return keys + index % 2 * (2 * Keys * D); }

  __device__ BFloat16* v_tile(int index) const { return k_tile(index) + Keys * D; }

  // Where a row of the block begins in q, or -1 behind the last one.
  __device__ std::int64_t row_offset(int row) const {
    const int packed = first_row + row;
    return packed < args.rows() ? args.query_row(kv_head, packed) * D : -1;
  }

  __device__ void load_keys(int index, const typename KeyTiles<Keys>::Tile& tile) const {
    load_tiles<D, Keys, Threads>(
        [&](int row) {
          const int key = tile.keys.begin + row;
          return key < tile.keys.end ? args.key_row(kv_head, key) * D : -1;
        },
        TileCopy{k_tile(index), tile.is_pinned ? args.pinned_k : args.k},
        TileCopy{v_tile(index), tile.is_pinned ? args.pinned_v : args.v});
  }

  // Sets to `value` what the warp's rows, from `row` on, do not see of a tile.
  template <int MT, int NT>
  __device__ void mask(float (&c)[MT][NT][4],
                       int row,
                       const typename KeyTiles<Keys>::Tile& tile,
                       float value) const {
    const int lane = lane_id();
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = row + m * 16 + half * 8 + lane / 4;
        const KeySpan span = tile.is_pinned ? pinned[at] : window[at];
#pragma unroll
        for (int i = 0; i < 2 * NT; ++i) {
          const int key = tile.keys.begin + i / 2 * 8 + lane % 4 * 2 + i % 2;
          if (!span.contains(key)) {
            c[m][i / 2][2 * half + i % 2] = value;
          }
        }
      }
    }
  }
};

}  // namespace bifocal
