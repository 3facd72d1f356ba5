// Sliding attention on tensor cores, gradients of keys and values: a block holds a tile of keys and
// goes through the packed query rows that see some of them, in order, with all query heads of the
// key-value head. Logits are made transposed, so that a warp's results need no other warp.
//
// The keys of the window are seen by few queries or, where windows are full, by many; there are
// many of them. Pinned keys are few and seen by all queries of a document: blocks share out the
// tokens, write partial sums, and a second kernel adds those in order.
#include <algorithm>

#include "kernels/attention_tile.cuh"
#include "kernels/device_scratch.h"
#include "kernels/launch.cuh"

namespace bifocal {
namespace {

constexpr int kSumThreads = 256;

template <int D>
struct KeyGradientShape {
  static constexpr int kParts = D == 256 ? 2 : 1;  // warps that share 16 keys, by columns of sums
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kKeys = 16 * kWarps / kParts;
  static constexpr int kRows = 4096 / D;  // query rows of a tile
  static constexpr int kTileElements = kRows * D;
  static constexpr int kKeyBytes = 2 * kKeys * D * static_cast<int>(sizeof(BFloat16));
  static constexpr int kQueryBytes = 4 * kTileElements * static_cast<int>(sizeof(BFloat16));
  static constexpr int kRowBytes = 2 * 4 * kRows * static_cast<int>(sizeof(float));
  static constexpr int kBytes = kKeyBytes + kQueryBytes + kRowBytes;
};

// Which keys a launch is for, and how many blocks share the tokens of a tile of keys.
struct KeyWork {
  bool is_pinned;
  int keys, tiles;  // of one key-value head
  int tokens_of_block;
  float* partial;  // pinned: [blocks of a tile][d_k, d_v][pinned, kv_heads, dim]
};

// One stage of query rows in shared memory.
template <int D>
struct QueryStage {
  static constexpr int kRows = KeyGradientShape<D>::kRows;
  BFloat16 *q, *d_out;        // tiles
  float *lse, *delta;         // [kRows]
  std::int32_t *begin, *end;  // [kRows]: the keys that a row sees

  __device__ QueryStage(unsigned char* memory, int index) {
    constexpr int kTile = KeyGradientShape<D>::kTileElements;
    q = reinterpret_cast<BFloat16*>(memory) + index % 2 * (2 * kTile);
    d_out = q + kTile;
    unsigned char* rows = memory + KeyGradientShape<D>::kQueryBytes;
    lse = reinterpret_cast<float*>(rows) + index % 2 * (4 * kRows);
    delta = lse + kRows;
    begin = reinterpret_cast<std::int32_t*>(delta + kRows);
    end = begin + kRows;
  }
};

// A block's keys and the packed rows that it goes through.
template <int D>
struct KeyBlock {
  using Shape = KeyGradientShape<D>;
  const AttentionArgs<BFloat16>& args;
  const AttentionGradients<BFloat16>& gradients;
  const KeyWork& work;
  int kv_head;
  KeySpan keys;
  int first_row, end_row;

  __device__ KeyBlock(const AttentionArgs<BFloat16>& a,
                      const AttentionGradients<BFloat16>& g,
                      const KeyWork& w)
      : args(a), gradients(g), work(w), kv_head(static_cast<int>(blockIdx.x) % a.kv_heads) {
    keys.begin = static_cast<int>(blockIdx.x) / a.kv_heads * Shape::kKeys;
    keys.end = min(keys.begin + Shape::kKeys, w.keys);
    int begin = static_cast<int>(blockIdx.y) * w.tokens_of_block;
    int end = min(begin + w.tokens_of_block, a.tokens);
    if (!w.is_pinned) {
      begin = max(begin, keys.begin - a.own());
      end = min(end, warp_upper_bound(a.key_begin, a.tokens, keys.end - 1));
    }
    first_row = begin * a.group;
    end_row = end * a.group;
  }

  // The first row from `row` on, in steps of a tile, whose tile sees a key; or one >= end_row. The
  // queries of a window's keys lie side by side.
  __device__ int next_row(int row) const {
    while (work.is_pinned && row < end_row) {
      const int last = (min(row + Shape::kRows, end_row) - 1) / args.group;
      bool sees = false;
      for (int token = row / args.group + lane_id(); token <= last; token += 32) {
        const KeySpan span = pinned_span(args, token);
        sees = sees || max(span.begin, keys.begin) < min(span.end, keys.end);
      }
      if (__any_sync(0xffffffffU, sees)) {
        break;
      }
      row += Shape::kRows;
    }
    return row;
  }

  // Starts the copies of a tile of rows. Rows past the end become zeros, which add nothing.
  __device__ void load_rows(int first, const QueryStage<D>& stage) const {
    load_tiles<D, Shape::kRows, Shape::kThreads>(
        [&](int row) {
          return first + row < end_row ? args.query_row(kv_head, first + row) * D : -1;
        },
        TileCopy{stage.q, args.q},
        TileCopy{stage.d_out, gradients.d_out});
    const int row = static_cast<int>(threadIdx.x);
    if (row < Shape::kRows) {
      const bool is_row = first + row < end_row;
      const int packed = is_row ? first + row : first;
      const int token = packed / args.group;
      const std::int64_t at = args.query_row(kv_head, packed);
      copy_word_async(stage.lse + row, gradients.lse + at, is_row);
      copy_word_async(stage.delta + row, gradients.delta + at, is_row);
      copy_word_async(
          stage.begin + row, (work.is_pinned ? args.pinned_begin : args.key_begin) + token, is_row);
      if (work.is_pinned) {
        copy_word_async(stage.end + row, args.pinned_end + token, is_row);
      } else {
        stage.end[row] = is_row ? args.own() + token + 1 : 0;
      }
    }
  }

  // Whether each row of a tile that has come sees each key.
  __device__ bool is_full(int first, const QueryStage<D>& stage) const {
    const int last = min(Shape::kRows, end_row - first) - 1;
    return !work.is_pinned && stage.begin[last] <= keys.begin && keys.end <= stage.end[0];
  }

  const __device__ BFloat16* k() const { return work.is_pinned ? args.pinned_k : args.k; }

  const __device__ BFloat16* v() const { return work.is_pinned ? args.pinned_v : args.v; }

  // Where a key of the tile begins in k, or -1 behind the last one.
  __device__ std::int64_t key_offset(int row) const {
    const int key = keys.begin + row;
    return key < keys.end ? args.key_row(kv_head, key) * D : -1;
  }
};

// Products k q become probabilities: c [16 keys, NT x 8 rows] of keys from `first` on.
template <int D, int NT>
__device__ void make_probabilities(
    float (&c)[1][NT][4], const QueryStage<D>& stage, bool is_full, int first, float scale) {
  const int lane = lane_id();
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = n * 8 + lane % 4 * 2 + i;
      const float lse = stage.lse[row] * kLog2OfE;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& x = c[0][n][2 * half + i];
        x = exp2_fast(fmaf(x, scale, -lse));
        if (!is_full) {
          const KeySpan span{stage.begin[row], stage.end[row]};
          x = span.contains(first + half * 8 + lane / 4) ? x : 0.0F;
        }
      }
    }
  }
}

// dP = d_out v becomes dz = P (dP - delta).
template <int D, int NT>
__device__ void make_d_logits(float (&dp)[1][NT][4],
                              const float (&p)[1][NT][4],
                              const QueryStage<D>& stage) {
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float delta = stage.delta[n * 8 + lane_id() % 4 * 2 + e % 2];
      dp[0][n][e] = p[0][n][e] * (dp[0][n][e] - delta);
    }
  }
}

// A warp's sums [16 keys, 8 DT columns from chunk `first` on] times factor to float32 rows.
template <int D, int DT>
__device__ void store_partial(const float (&c)[1][DT][4],
                              float factor,
                              const KeyBlock<D>& block,
                              int warp_row,
                              int first,
                              float* to) {
  const int lane = lane_id();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t begin = block.key_offset(warp_row + half * 8 + lane / 4);
    if (begin < 0) {
      continue;
    }
#pragma unroll
    for (int n = 0; n < DT; ++n) {
      const Vector<float, 2> pair{{c[0][n][2 * half] * factor, c[0][n][2 * half + 1] * factor}};
      store_vector<2>(to + begin + (first + n) * kChunk + lane % 4 * 2, 0, pair);
    }
  }
}

template <int D>
__global__ void __launch_bounds__(KeyGradientShape<D>::kThreads)
    key_gradient_kernel(const AttentionArgs<BFloat16> a,
                        const AttentionGradients<BFloat16> g,
                        const KeyWork work) {
  using Shape = KeyGradientShape<D>;
  constexpr int kNT = Shape::kRows / 8;
  constexpr int kDT = D / 8 / Shape::kParts;
  unsigned char* memory = dynamic_shared();
  auto* k = reinterpret_cast<BFloat16*>(memory);
  BFloat16* v = k + Shape::kKeys * D;
  unsigned char* stages = memory + Shape::kKeyBytes;
  const KeyBlock<D> block(a, g, work);
  const int warp_row = warp_id() / Shape::kParts * 16;
  const int first_chunk = warp_id() % Shape::kParts * kDT;
  load_tiles<D, Shape::kKeys, Shape::kThreads>([&](int row) { return block.key_offset(row); },
                                               TileCopy{k, block.k()},
                                               TileCopy{v, block.v()});
  int row = block.next_row(block.first_row);
  if (row < block.end_row) {
    block.load_rows(row, QueryStage<D>(stages, 0));
  }

  float d_k[1][kDT][4] = {};
  float d_v[1][kDT][4] = {};
  const float scale = a.scale * kLog2OfE;
  for (int i = 0; row < block.end_row; ++i) {
    const int next = block.next_row(row + Shape::kRows);
    wait_copies();
    __syncthreads();  // tile i has come, and tile i - 1 is done with
    if (next < block.end_row) {
      block.load_rows(next, QueryStage<D>(stages, i + 1));
    }
    const QueryStage<D> stage(stages, i);
    float p[1][kNT][4] = {};
    multiply_rows<D>(p, SharedElements(k), warp_row, SharedElements(stage.q));
    make_probabilities<D>(p, stage, block.is_full(row, stage), block.keys.begin + warp_row, scale);
    multiply_columns<D>(d_v, p, SharedElements(stage.d_out), first_chunk);
    float dz[1][kNT][4] = {};
    multiply_rows<D>(dz, SharedElements(v), warp_row, SharedElements(stage.d_out));
    make_d_logits<D>(dz, p, stage);
    multiply_columns<D>(d_k, dz, SharedElements(stage.q), first_chunk);
    row = next;
  }

  wait_copies();
  __syncthreads();  // the keys' tiles are done with, also where no query saw them
  if (work.is_pinned) {
    const std::int64_t size = static_cast<std::int64_t>(a.pinned) * a.kv_heads * D;
    float* to = work.partial + blockIdx.y * 2 * size;
    store_partial<D>(d_k, a.scale, block, warp_row, first_chunk, to);
    store_partial<D>(d_v, 1.0F, block, warp_row, first_chunk, to + size);
    return;
  }
  const auto offset = [&](int key) { return block.key_offset(key); };
  const float k_factor[1][2] = {{a.scale, a.scale}};
  const float v_factor[1][2] = {{1.0F, 1.0F}};
  store_rows<D>(d_k, k_factor, k, warp_row, first_chunk, g.d_k, offset);
  store_rows<D>(d_v, v_factor, v, warp_row, first_chunk, g.d_v, offset);
}

// y = the sum of `count` partial results, in order.
__global__ void __launch_bounds__(kSumThreads) add_partial_kernel(
    BFloat16* d_k, BFloat16* d_v, const float* partial, int count, std::int64_t size) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  if (at >= 2 * size) {
    return;
  }
  float sum = 0.0F;
  for (int i = 0; i < count; ++i) {
    sum += partial[i * 2 * size + at];
  }
  if (at < size) {
    d_k[at] = store_as<BFloat16>(sum);
  } else {
    d_v[at - size] = store_as<BFloat16>(sum);
  }
}

template <int D>
void launch_keys(CudaStream& stream,
                 const AttentionArgs<BFloat16>& a,
                 const AttentionGradients<BFloat16>& g,
                 const KeyWork& work,
                 std::int64_t blocks_of_tile) {
  using Shape = KeyGradientShape<D>;
  dim3 grid = grid_of(static_cast<std::int64_t>(work.tiles) * a.kv_heads);
  grid.y = static_cast<unsigned>(blocks_of_tile);
  launch_kernel(stream, grid, Shape::kThreads, Shape::kBytes, key_gradient_kernel<D>, a, g, work);
}

// How many blocks share a tile depends on the problem alone, and so do the bits.
template <int D>
void launch_pinned(CudaStream& stream,
                   const AttentionArgs<BFloat16>& a,
                   const AttentionGradients<BFloat16>& g) {
  constexpr std::int64_t kEnoughBlocks = 256;
  constexpr std::int64_t kLeastTokens = 64;  // of a block
  const std::int64_t tiles = ceil_div(a.pinned, KeyGradientShape<D>::kKeys);
  const std::int64_t most = std::max<std::int64_t>(1, ceil_div(a.tokens, kLeastTokens));
  const std::int64_t wanted =
      std::clamp<std::int64_t>(ceil_div(kEnoughBlocks, tiles * a.kv_heads), 1, most);
  const std::int64_t tokens = std::max<std::int64_t>(1, ceil_div(a.tokens, wanted));
  const std::int64_t blocks = std::max<std::int64_t>(1, ceil_div(a.tokens, tokens));
  const std::int64_t size = static_cast<std::int64_t>(a.pinned) * a.kv_heads * D;
  DeviceScratch scratch(stream);
  auto* partial = scratch.take<float>(blocks * 2 * size);
  const KeyWork work{.is_pinned = true,
                     .keys = a.pinned,
                     .tiles = static_cast<int>(tiles),
                     .tokens_of_block = static_cast<int>(tokens),
                     .partial = partial};
  launch_keys<D>(stream, a, g, work, blocks);
  launch_kernel(stream,
                grid_of(ceil_div(2 * size, kSumThreads)),
                kSumThreads,
                0,
                add_partial_kernel,
                g.d_pinned_k,
                g.d_pinned_v,
                partial,
                static_cast<int>(blocks),
                size);
}

template <int D>
void launch(CudaStream& stream,
            const AttentionArgs<BFloat16>& a,
            const AttentionGradients<BFloat16>& g) {
  if (a.keys > 0) {
    const KeyWork work{.is_pinned = false,
                       .keys = a.keys,
                       .tiles = static_cast<int>(ceil_div(a.keys, KeyGradientShape<D>::kKeys)),
                       .tokens_of_block = a.tokens,
                       .partial = nullptr};
    launch_keys<D>(stream, a, g, work, 1);
  }
}

}  // namespace

void differentiate_pinned_tiles(CudaStream& stream,
                                const AttentionArgs<BFloat16>& a,
                                const AttentionGradients<BFloat16>& g) {
  if (a.dim == 64) {
    launch_pinned<64>(stream, a, g);
  } else if (a.dim == 128) {
    launch_pinned<128>(stream, a, g);
  } else {
    launch_pinned<256>(stream, a, g);
  }
}

void differentiate_key_tiles(CudaStream& stream,
                             const AttentionArgs<BFloat16>& a,
                             const AttentionGradients<BFloat16>& g) {
  if (a.dim == 64) {
    launch<64>(stream, a, g);
  } else if (a.dim == 128) {
    launch<128>(stream, a, g);
  } else {
    launch<256>(stream, a, g);
  }
  if (a.pinned > 0) {
    differentiate_pinned_tiles(stream, a, g);
  }
}

}  // namespace bifocal
