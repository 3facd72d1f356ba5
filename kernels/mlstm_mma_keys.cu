// The mLSTM's gradients of keys and values on tensor cores: a warp holds 16 tokens and walks over
// the reads that see them. Weights are made anew here and for the queries, which costs less than
// moving them through memory.
#include "kernels/mlstm_mma.cuh"

namespace bifocal {
namespace {

constexpr int kThreads = kMlstmStrips * 32;

template <int D>
struct KeyShared {
  static constexpr int kColumns = kMlstmColumns<D>;

  MlstmChunkScalars scalars;
  float normaliser[kColumns];  // d_n, of this block's features
  float inverse[kMlstmChunk], delta[kMlstmChunk];
  float partial[2 * kThreads / 32];

  // Keys and values; then d_C, later queries and gradients of reads.
  static constexpr int bytes() {
    constexpr int kReads = SharedTile<D>::bytes(2 * kMlstmChunk);
    constexpr int kState = SharedTile<kColumns>::bytes(D);
    constexpr int kTransposed = SharedTile<D>::bytes(kColumns);
    constexpr int kStates = kState > kTransposed ? kState : kTransposed;
    return static_cast<int>(sizeof(KeyShared)) + SharedTile<D>::bytes(2 * kMlstmChunk) +
           (kReads > kStates ? kReads : kStates);
  }
};

// <X, dX> over rows [first, first + kColumns) of C and of n, the same in every thread.
template <int D>
__device__ float product_of_states(KeyShared<D>& s, const float* x, const float* d_x, int first) {
  constexpr int kColumns = kMlstmColumns<D>;
  const int thread = static_cast<int>(threadIdx.x);
  float sum = 0.0F;
#pragma unroll 2
  for (int item = thread; item < kColumns * D / 4; item += 2 * kThreads) {
    const auto a = load_vector<4>(x + first * D, item);
    const auto b = load_vector<4>(d_x + first * D, item);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum += a.element[i] * b.element[i];
    }
  }
  if (thread < kColumns) {
    sum += x[D * D + first + thread] * d_x[D * D + first + thread];
  }
  sum = warp_sum(sum);
  if (thread % 32 == 0) {
    s.partial[thread / 32] = sum;
  }
  __syncthreads();
  sum = 0.0F;
#pragma unroll
  for (int warp = 0; warp < 2 * kThreads / 32; ++warp) {
    sum += s.partial[warp];
  }
  return sum;
}

// sums = w (dC v + dn) for a warp's keys; returns k . sums of rows low and low + 8.
template <int D>
__device__ float2 leave_states(float (&sums)[kMlstmColumns<D> / 8][4],
                               const KeyShared<D>& s,
                               const SharedTile<D>& values,
                               const SharedTile<D>& keys,
                               const SharedTile<D>& d_state,
                               int row,
                               int feature) {
  add_product_transposed(sums, values, row, d_state);
  const int lane = lane_of_warp();
  const int low = row + lane / 4;
  const float low_weight = s.scalars.write[low];
  const float high_weight = s.scalars.write[low + 8];
  float2 left = make_float2(0.0F, 0.0F);
#pragma unroll
  for (int n = 0; n < kMlstmColumns<D> / 8; ++n) {
    const int column = n * 8 + lane % 4 * 2;
    const auto low_k = *reinterpret_cast<const std::uint32_t*>(keys.at(low, feature + column));
    const auto high_k = *reinterpret_cast<const std::uint32_t*>(keys.at(low + 8, feature + column));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[n][i] = low_weight * (sums[n][i] + s.normaliser[column + i]);
      sums[n][i + 2] = high_weight * (sums[n][i + 2] + s.normaliser[column + i]);
      left.x += sums[n][i] * (i == 0 ? low_of(low_k) : high_of(low_k));
      left.y += sums[n][i + 2] * (i == 0 ? low_of(high_k) : high_of(high_k));
    }
  }
  return left;
}

// The transposed gradients of q k^T (of_keys) or weights over N, of 16 tokens j and 16 reads t.
template <int D>
__device__ void weigh_reads(std::uint32_t (&left)[4],
                            float (&p)[2][4],
                            const KeyShared<D>& s,
                            bool of_keys,
                            int row,
                            int from) {
  const int lane = lane_of_warp();
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = row + lane / 4 + i / 2 * 8;
      const int t = from + n * 8 + lane % 4 * 2 + i % 2;
      const float scaled = s.inverse[t] * p[n][i];
      p[n][i] = s.scalars.weight(t, j) * (of_keys ? scaled + s.delta[t] : scaled);
    }
  }
  pack_left(left, p);
}

// A block's tiles: gradients of states lie where queries and gradients of reads come later.
template <int D>
struct KeyTiles {
  static constexpr int kTile = kMlstmChunk * SharedTile<D>::kStride;

  SharedTile<D> keys, values, queries, d_reads;
  SharedTile<D> d_rows;                    // rows of dC for d_k
  SharedTile<kMlstmColumns<D>> d_columns;  // columns of dC for d_v; the same up to width 128

  __device__ explicit KeyTiles(BFloat16* memory)
      : keys{memory},
        values{memory + kTile},
        queries{memory + 2 * kTile},
        d_reads{memory + 3 * kTile},
        d_rows{queries.data},
        d_columns{queries.data} {}
};

// Where a warp stands: four gather d_k, four d_v, each 16 tokens.
struct Warp {
  bool of_keys;
  int row, low;

  __device__ Warp()
      : of_keys(static_cast<int>(threadIdx.x) < kThreads),
        row(static_cast<int>(threadIdx.x) % kThreads / 32 * 16),
        low(row + lane_of_warp() / 4) {}
};

__device__ inline void store_left(const MlstmBlock& block,
                                  float2 left,
                                  std::int64_t part,
                                  const Warp& warp) {
  const float low_sum = quad_sum(left.x);
  const float high_sum = quad_sum(left.y);
  float* to = block.a.logs.left + part * block.a.shape.tokens + block.begin;
  if (lane_of_warp() % 4 == 0) {
    if (warp.low < block.length) {
      to[warp.low] = low_sum;
    }
    if (warp.low + 8 < block.length) {
      to[warp.low + 8] = high_sum;
    }
  }
}

// The state's part: starts a key warp's sums, adds to a value warp's. passed and left on the way.
template <int D>
__device__ void leave_chunk(float (&sums)[kMlstmColumns<D> / 8][4],
                            KeyShared<D>& s,
                            const KeyTiles<D>& tiles,
                            const MlstmBlock& block,
                            const Warp& warp,
                            int column) {
  constexpr int kColumns = kMlstmColumns<D>;
  const MlstmArrays<BFloat16>& a = block.a;
  const int thread = static_cast<int>(threadIdx.x);
  const float* d_x = block.leaving();
  const std::int64_t part = static_cast<std::int64_t>(block.state) * gridDim.z + blockIdx.z;
  tiles.d_rows.load_rounded(d_x + column * D, D, kColumns, thread, 2 * kThreads);
  if (thread < kColumns) {
    s.normaliser[thread] = d_x[D * D + column + thread];
  }
  float passed =
      a.scalars.pass[static_cast<std::int64_t>(block.state) * a.shape.chunks + block.chunk];
  if (passed != 0.0F) {
    passed *= product_of_states<D>(s, block.entering(), d_x, column);
  }
  if (thread == 0) {
    a.logs.passed[part * a.shape.chunks + block.chunk] = passed;
  }
  wait_copies();
  __syncthreads();
  if (warp.of_keys) {
    clear(sums);
    const float2 left =
        leave_states<D>(sums, s, tiles.values, tiles.keys, tiles.d_rows, warp.row, column);
    store_left(block, left, part, warp);
  }
  if constexpr (kColumns < D) {
    __syncthreads();
    tiles.d_columns.load_rounded(d_x + column, D, D, thread, 2 * kThreads);
    __syncthreads();
  }
  if (!warp.of_keys) {
    add_scaled_product(sums,
                       tiles.keys,
                       warp.row,
                       tiles.d_columns,
                       s.scalars.write[warp.low],
                       s.scalars.write[warp.low + 8]);
  }
  __syncthreads();
}

// sums += what the reads of one head give a warp's tokens.
template <int D>
__device__ void add_reads(float (&sums)[kMlstmColumns<D> / 8][4],
                          const KeyShared<D>& s,
                          const KeyTiles<D>& tiles,
                          const Warp& warp,
                          int column) {
  constexpr int kTile = KeyTiles<D>::kTile;
  const SharedTile<D> own{tiles.keys.data + (warp.of_keys ? kTile : 0)};
  const SharedTile<D> reads{tiles.queries.data + (warp.of_keys ? kTile : 0)};
  const SharedTile<D> gathered{tiles.queries.data + (warp.of_keys ? 0 : kTile)};
  for (int from = warp.row; from < kMlstmChunk; from += 16) {
    float p[2][4];
    std::uint32_t left[4];
    multiply_rows(p, own, warp.row, reads, from);
    weigh_reads<D>(left, p, s, warp.of_keys, warp.row, from);
    add_weighted_rows(sums, left, gathered, from, column);
  }
}

// A block for each 128 columns of a chunk of one value head; d_v goes on over the states that hold
// the value head.
template <int D>
__global__ void __launch_bounds__(2 * kThreads, mlstm_blocks<D>())
    key_gradients_kernel(MlstmArrays<BFloat16> a) {
  constexpr int kColumns = kMlstmColumns<D>;
  extern __shared__ uint4 memory[];
  auto& s = *reinterpret_cast<KeyShared<D>*>(memory);
  const KeyTiles<D> tiles(reinterpret_cast<BFloat16*>(&s + 1));
  const Warp warp;
  const int thread = static_cast<int>(threadIdx.x);
  const int chunk = static_cast<int>(blockIdx.x);
  const int v_head = static_cast<int>(blockIdx.y);
  const int column = static_cast<int>(blockIdx.z) * kColumns;
  float sums[kColumns / 8][4];
  clear(sums);
  for (int holder = 0; holder < a.shape.holders; ++holder) {
    const MlstmBlock block(a, chunk, v_head * a.shape.holders + holder);
    if (holder == 0) {
      block.load_values(tiles.values, 0, thread, 2 * kThreads);
    }
    block.load_keys(tiles.keys, 0, thread, 2 * kThreads);
    s.scalars.load(a.shape, a.scalars, chunk, block.state);
    leave_chunk<D>(sums, s, tiles, block, warp, column);
    for (int reader = 0; reader < a.shape.readers; ++reader) {
      const int head = block.state * a.shape.readers + reader;
      block.load_head(tiles.queries, a.q, head, 0, thread, 2 * kThreads);
      block.load_head(tiles.d_reads, a.d_h, head, 0, thread, 2 * kThreads);
      block.load_scalars(head, s.inverse, s.delta);
      wait_copies();
      __syncthreads();
      add_reads<D>(sums, s, tiles, warp, column);
      __syncthreads();
    }
    if (warp.of_keys) {
      store_rows(sums,
                 tiles.queries,
                 warp.row,
                 a.d_k + a.shape.key_row(block.begin, block.state) + column,
                 static_cast<std::int64_t>(a.shape.states) * D,
                 block.length);
    }
    __syncthreads();
  }
  if (!warp.of_keys) {
    store_rows(sums,
               tiles.d_reads,
               warp.row,
               a.d_v + a.shape.value_row(chunk * kMlstmChunk, v_head) + column,
               static_cast<std::int64_t>(a.shape.v_heads) * D,
               a.shape.length(chunk));
  }
}

template <int D>
void launch(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  allow_shared(key_gradients_kernel<D>, KeyShared<D>::bytes());
  const dim3 grid = mlstm_grid(a.shape, a.shape.v_heads, D / kMlstmColumns<D>);
  key_gradients_kernel<D><<<grid, 2 * kThreads, KeyShared<D>::bytes(), stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
}

}  // namespace

bool has_mma_mlstm(const MlstmArrays<BFloat16>& a, bool backward) {
  const int dim = a.shape.dim;
  if ((dim != 64 && dim != 128 && dim != 256) || !is_aligned(16, a.q, a.k, a.v, a.h_out)) {
    return false;
  }
  return !backward || (mma_mlstm_query_bytes(dim) <= most_shared_bytes() &&
                       is_aligned(16, a.h, a.d_h, a.d_q, a.d_k, a.d_v));
}

int mma_mlstm_parts(int dim) {
  return dim == 256 ? 2 : 1;
}

void mma_mlstm_gradients(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  mma_mlstm_query_gradients(stream, a);
  with_mma_width(a.shape.dim, [&](auto width) { launch<width()>(stream, a); });
}

}  // namespace bifocal
