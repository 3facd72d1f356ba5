// Backward pass of sliding attention on Hopper: one pass over d_out and out for their products row
// by row and the sink's gradient, small tables of who sees whom, then the gradients' kernels.
#include <cmath>

#include "kernels/attention_tile.cuh"
#include "kernels/device_scratch.h"
#include "kernels/launch.cuh"
#include "kernels/sliding_attention_hopper_backward.cuh"

namespace bifocal {
namespace hopper {
namespace {

constexpr int kThreads = 256;

// What the pass over rows writes besides `rows`.
struct PreparedSums {
  float* delta;         // [tokens, heads], optional
  float* sink_partial;  // [heads, tiles], optional: sums of exp(sink - lse) delta over a tile
};

// The first lane of every row of the block gets d_out . out of its row.
template <int D, int Rows>
struct RowProducts {
  static constexpr int kLanes = D / kChunk;  // of a row
  static constexpr int kRowsAtOnce = kThreads / kLanes;
  static constexpr int kPasses = Rows / kRowsAtOnce;
  float sum[kPasses];

  // offset(row) is where a row begins, or negative.
  template <class Offset>
  __device__ RowProducts(const BFloat16* x, const BFloat16* y, const Offset& offset) {
    Vector<BFloat16, kChunk> left[kPasses];
    Vector<BFloat16, kChunk> right[kPasses];
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const std::int64_t begin = offset(row(i));
      left[i] = begin < 0 ? Vector<BFloat16, kChunk>{} : load_vector<kChunk>(x + begin, lane);
      right[i] = begin < 0 ? Vector<BFloat16, kChunk>{} : load_vector<kChunk>(y + begin, lane);
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      sum[i] = 0.0F;
#pragma unroll
      for (int j = 0; j < kChunk; ++j) {
        sum[i] += load_float(left[i].element[j]) * load_float(right[i].element[j]);
      }
#pragma unroll
      for (int to = kLanes / 2; to > 0; to /= 2) {
        sum[i] += __shfl_xor_sync(0xffffffffU, sum[i], to);
      }
    }
  }

  static __device__ int row(int pass) {
    return pass * kRowsAtOnce + static_cast<int>(threadIdx.x) / kLanes;
  }

  static __device__ bool is_first_lane() {
    return threadIdx.x % kLanes == 0;
  }
};

// A block has one tile of rows of one key-value head.
template <int D>
__global__ void __launch_bounds__(kThreads) prepare_kernel(const AttentionArgs<BFloat16> a,
                                                           const BFloat16* d_out,
                                                           const BFloat16* out,
                                                           const float* lse,
                                                           const BackwardRows rows,
                                                           const PreparedSums to) {
  __shared__ float tile_delta[kGroupRows];
  __shared__ float tile_lse[kGroupRows];
  const int tile = static_cast<int>(blockIdx.x) / a.kv_heads;
  const int kv_head = static_cast<int>(blockIdx.x) % a.kv_heads;
  const int first_token = tile * rows.tokens_of_tile;
  const auto place = [&](int row) {  // in [tokens, heads], or negative
    const int token = first_token + row / a.group;
    const bool is_row = row < rows.rows_of_tile && token < a.tokens;
    return is_row ? static_cast<std::int64_t>(token) * a.heads + kv_head * a.group + row % a.group
                  : std::int64_t{-1};
  };
  using Products = RowProducts<D, kGroupRows>;
  const Products products(d_out, out, [&](int row) { return place(row) * D; });
  if (Products::is_first_lane()) {
#pragma unroll
    for (int i = 0; i < Products::kPasses; ++i) {
      tile_delta[Products::row(i)] = products.sum[i];
    }
  }
  __syncthreads();
  const int row = static_cast<int>(threadIdx.x);
  if (row < kGroupRows) {
    const std::int64_t at = place(row);
    const float own_lse = at < 0 ? INFINITY : lse[at] * kLog2OfE;
    tile_lse[row] = own_lse;
    float* statistics = rows.statistics + static_cast<std::int64_t>(blockIdx.x) * 2 * kGroupRows;
    statistics[row] = own_lse;
    statistics[kGroupRows + row] = tile_delta[row];
    if (at >= 0 && to.delta != nullptr) {
      to.delta[at] = tile_delta[row];
    }
    if (kv_head == 0) {
      const int token = min(first_token + min(row, rows.rows_of_tile - 1) / a.group, a.tokens - 1);
      const KeySpan span = window_span(a, token);
      std::int32_t* spans = rows.spans + static_cast<std::int64_t>(tile) * 2 * kGroupRows;
      spans[row] = span.begin;
      spans[kGroupRows + row] = span.end;
    }
  }
  if (to.sink_partial == nullptr) {
    return;
  }
  __syncthreads();
  if (row < a.group) {
    const int head = kv_head * a.group + row;
    const float sink = load_float(a.sink[head]) * kLog2OfE;
    float sum = 0.0F;
    for (int i = row; i < rows.rows_of_tile; i += a.group) {
      sum += exp2_fast(sink - tile_lse[i]) * tile_delta[i];
    }
    to.sink_partial[static_cast<std::int64_t>(head) * rows.tiles + tile] = sum;
  }
}

// A block has one head, and adds up its tiles in an order that is always the same.
__global__ void __launch_bounds__(kThreads)
    sink_kernel(float* d_sink, const float* partial, int tiles) {
  __shared__ float sums[kThreads / 32];
  const float* from = partial + static_cast<std::int64_t>(blockIdx.x) * tiles;
  float sum = 0.0F;
  for (int i = static_cast<int>(threadIdx.x); i < tiles; i += kThreads) {
    sum += from[i];
  }
  sum = warp_sum(sum);
  if (lane_id() == 0) {
    sums[warp_id()] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0.0F;
    for (const float part : sums) {
      total += part;
    }
    d_sink[blockIdx.x] -= total;
  }
}

// The tiles of rows that see some of 64 keys.
__device__ int2 tiles_of_keys(const AttentionArgs<BFloat16>& a, int tokens_of_tile, int index) {
  const int begin = index * kGroupRows;
  const int end = min(begin + kGroupRows, a.keys);
  if (begin >= end) {
    return {0, 0};
  }
  const int first = max(begin - a.own(), 0);
  const int last = warp_upper_bound(a.key_begin, a.tokens, end - 1);
  return first < last ? int2{first / tokens_of_tile, (last + tokens_of_tile - 1) / tokens_of_tile}
                      : int2{0, 0};
}

// The pinned keys that tokens [begin, end) see some of.
__device__ int2 pinned_of_tokens(const AttentionArgs<BFloat16>& a, int begin, int end) {
  int first = a.pinned;
  int last = 0;
  for (int token = begin + lane_id(); token < end; token += 32) {
    const KeySpan span = pinned_span(a, token);
    if (span.begin < span.end) {
      first = min(first, span.begin);
      last = max(last, span.end);
    }
  }
  first = __reduce_min_sync(0xffffffffU, first);
  return {first, max(first, __reduce_max_sync(0xffffffffU, last))};
}

// A warp has one entry of one of the tables.
__global__ void __launch_bounds__(kThreads)
    table_kernel(const AttentionArgs<BFloat16> a, const BackwardRows rows, int key_entries) {
  const int index = static_cast<int>(blockIdx.x) * (kThreads / 32) + warp_id();
  if (index < key_entries) {
    const int2 tiles = tiles_of_keys(a, rows.tokens_of_tile, index);
    if (lane_id() == 0) {
      rows.tiles_of_keys[index] = tiles;
    }
    return;
  }
  const int pair = index - key_entries;
  if (rows.pinned_of_pair == nullptr || pair >= rows.pairs()) {
    return;
  }
  const int tokens = 2 * rows.tokens_of_tile;
  const int2 keys = pinned_of_tokens(a, pair * tokens, min((pair + 1) * tokens, a.tokens));
  if (lane_id() == 0) {
    rows.pinned_of_pair[pair] = keys;
  }
}

// Fills `rows`, d_out . out [tokens, heads] where wanted, and adds to the sink's gradient.
template <int D>
void prepare(CudaStream& stream,
             const AttentionArgs<BFloat16>& a,
             const AttentionGradients<BFloat16>& g,
             const BFloat16* out,
             const BackwardRows& rows,
             float* delta,
             float* d_sink) {
  DeviceScratch scratch(stream);
  PreparedSums sums{.delta = delta, .sink_partial = nullptr};
  if (a.sink != nullptr) {
    sums.sink_partial = scratch.take<float>(static_cast<std::int64_t>(a.heads) * rows.tiles);
  }
  launch_kernel(stream,
                grid_of(static_cast<std::int64_t>(rows.tiles) * a.kv_heads),
                kThreads,
                0,
                prepare_kernel<D>,
                a,
                g.d_out,
                out,
                g.lse,
                rows,
                sums);
  if (a.sink != nullptr) {
    launch_kernel(
        stream, grid_of(a.heads), kThreads, 0, sink_kernel, d_sink, sums.sink_partial, rows.tiles);
  }
}

}  // namespace
}  // namespace hopper

bool has_hopper_backward(const AttentionArgs<BFloat16>& a) {
  return a.tokens > 0 && a.group <= hopper::kGroupRows && (a.dim == 64 || a.dim == 128);
}

void differentiate_hopper(CudaStream& stream,
                          const AttentionArgs<BFloat16>& a,
                          AttentionGradients<BFloat16> g,
                          const BFloat16* out,
                          float* d_sink) {
  using hopper::kGroupRows;
  hopper::BackwardRows rows{};
  rows.tokens_of_tile = kGroupRows / a.group;
  rows.rows_of_tile = rows.tokens_of_tile * a.group;
  rows.tiles = static_cast<int>(ceil_div(a.tokens, 2 * rows.tokens_of_tile)) * 2;
  const int key_entries =
      static_cast<int>(ceil_div(a.keys, hopper::kBlockKeys)) * hopper::kConsumers;
  const bool has_gradients = g.d_q != nullptr;
  DeviceScratch scratch(stream);
  rows.statistics =
      scratch.take<float>(static_cast<std::int64_t>(rows.tiles) * a.kv_heads * 2 * kGroupRows);
  rows.spans = scratch.take<std::int32_t>(static_cast<std::int64_t>(rows.tiles) * 2 * kGroupRows);
  rows.tiles_of_keys = scratch.take<int2>(key_entries);
  float* delta = nullptr;
  if (a.pinned > 0 && has_gradients) {
    rows.pinned_of_pair = scratch.take<int2>(rows.pairs());
    delta = scratch.take<float>(static_cast<std::int64_t>(a.tokens) * a.heads);
  }
  if (a.dim == 64) {
    hopper::prepare<64>(stream, a, g, out, rows, delta, d_sink);
  } else {
    hopper::prepare<128>(stream, a, g, out, rows, delta, d_sink);
  }
  if (!has_gradients) {
    return;
  }
  launch_kernel(stream,
                grid_of(ceil_div(static_cast<std::int64_t>(key_entries) + rows.pairs(), 8)),
                hopper::kThreads,
                0,
                hopper::table_kernel,
                a,
                rows,
                key_entries);
  hopper::differentiate_queries(stream, a, g, rows);
  hopper::differentiate_keys(stream, a, g, rows);
  if (a.pinned > 0) {
    g.delta = delta;
    differentiate_pinned_tiles(stream, a, g);
  }
}

}  // namespace bifocal
