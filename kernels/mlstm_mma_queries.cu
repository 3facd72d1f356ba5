// The mLSTM's gradients of queries on tensor cores: a warp holds 16 reads of one head and walks
// over the tokens that they see.
#include "kernels/mlstm_mma.cuh"

namespace bifocal {
namespace {

constexpr int kThreads = kMlstmStrips * 32;

template <int D>
struct QueryShared {
  static constexpr int kColumns = kMlstmColumns<D>;

  MlstmChunkScalars scalars;
  float normaliser[kColumns];  // n, of this block's features
  float inverse[kMlstmChunk], delta[kMlstmChunk];

  // Queries, gradients of reads, keys, values and C; later the terms of log weights.
  static constexpr int bytes() {
    return static_cast<int>(sizeof(QueryShared)) + SharedTile<D>::bytes(4 * kMlstmChunk + kColumns);
  }
};

using Terms = float (*)[kMlstmChunk + 1];

// From terms[t][j] = w_tj s_tj over all readers, which is overwritten: sums over what decays
// through each token and over what reads each token. Threads [0, 64); ends with no barrier.
__device__ inline void differentiate_logs(const MlstmArrays<BFloat16>& a,
                                          Terms terms,
                                          int chunk,
                                          int state) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < kMlstmChunk) {
    for (int t = kMlstmChunk - 2; t >= i; --t) {
      terms[t][i] += terms[t + 1][i];
    }
  }
  __syncthreads();
  if (i < a.shape.length(chunk)) {
    float through = 0.0F;
    for (int j = 0; j < i; ++j) {
      through += terms[i][j];
    }
    const std::int64_t at =
        static_cast<std::int64_t>(state) * a.shape.tokens + chunk * kMlstmChunk + i;
    a.logs.through[at] = through;
    a.logs.written[at] = terms[i][i];
  }
}

// sums = u (e C^T + r n) for a warp's rows; returns q . sums of rows low and low + 8.
template <int D>
__device__ float2 read_states(float (&sums)[kMlstmColumns<D> / 8][4],
                              const QueryShared<D>& s,
                              const SharedTile<D>& d_reads,
                              const SharedTile<D>& queries,
                              const SharedTile<D>& state_tile,
                              int row,
                              int feature) {
  add_product_transposed(sums, d_reads, row, state_tile);
  const int lane = lane_of_warp();
  const int low = row + lane / 4;
  const float low_carry = s.scalars.carry[low];
  const float high_carry = s.scalars.carry[low + 8];
  float2 read = make_float2(0.0F, 0.0F);
#pragma unroll
  for (int n = 0; n < kMlstmColumns<D> / 8; ++n) {
    const int column = n * 8 + lane % 4 * 2;
    const auto low_q = *reinterpret_cast<const std::uint32_t*>(queries.at(low, feature + column));
    const auto high_q =
        *reinterpret_cast<const std::uint32_t*>(queries.at(low + 8, feature + column));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float from_n = s.normaliser[column + i];
      sums[n][i] = low_carry * (s.inverse[low] * sums[n][i] + s.delta[low] * from_n);
      sums[n][i + 2] =
          high_carry * (s.inverse[low + 8] * sums[n][i + 2] + s.delta[low + 8] * from_n);
      read.x += sums[n][i] * (i == 0 ? low_of(low_q) : high_of(low_q));
      read.y += sums[n][i + 2] * (i == 0 ? low_of(high_q) : high_of(high_q));
    }
  }
  return read;
}

// The gradients of q k^T for 16 reads and 16 tokens; adds the terms of log weights.
template <int D>
__device__ void differentiate_products(std::uint32_t (&left)[4],
                                       float (&terms)[2][4],
                                       const QueryShared<D>& s,
                                       float (&p)[2][4],
                                       const float (&g)[2][4],
                                       int row,
                                       int from) {
  const int lane = lane_of_warp();
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = row + lane / 4 + i / 2 * 8;
      const int j = from + n * 8 + lane % 4 * 2 + i % 2;
      const float weight = s.scalars.weight(t, j);
      const float d_weight = s.inverse[t] * g[n][i] + s.delta[t];
      terms[n][i] += weight * p[n][i] * d_weight;
      p[n][i] = weight * d_weight;
    }
  }
  pack_left(left, p);
}

// A chunk's tiles of one head; the terms of log weights take the first two when all heads are done.
template <int D>
struct QueryTiles {
  SharedTile<D> queries, d_reads, keys, values, state;

  __device__ explicit QueryTiles(BFloat16* memory)
      : queries{memory},
        d_reads{queries.at(kMlstmChunk, 0)},
        keys{d_reads.at(kMlstmChunk, 0)},
        values{keys.at(kMlstmChunk, 0)},
        state{values.at(kMlstmChunk, 0)} {}

  __device__ Terms terms() const {
    static_assert(2 * kMlstmChunk * SharedTile<D>::kStride * sizeof(BFloat16) >=
                  sizeof(float) * kMlstmChunk * (kMlstmChunk + 1));
    return reinterpret_cast<Terms>(queries.data);
  }
};

// sums += the part of d_q from the chunk's tokens; adds the terms of log weights.
template <int D>
__device__ void read_tokens(float (&sums)[kMlstmColumns<D> / 8][4],
                            float (&terms)[kMlstmStrips][2][4],
                            const QueryShared<D>& s,
                            const QueryTiles<D>& tiles,
                            int row,
                            int feature) {
#pragma unroll
  for (int block = 0; block < kMlstmStrips; ++block) {
    const int from = block * 16;
    if (from <= row) {
      float p[2][4];
      float g[2][4];
      std::uint32_t left[4];
      multiply_rows(p, tiles.queries, row, tiles.keys, from);
      multiply_rows(g, tiles.d_reads, row, tiles.values, from);
      differentiate_products<D>(left, terms[block], s, p, g, row, from);
      add_weighted_rows(sums, left, tiles.keys, from, feature);
    }
  }
}

__device__ inline void store_reads(const MlstmBlock& block, float2 read, int row) {
  const int low = row + lane_of_warp() / 4;
  const float low_sum = quad_sum(read.x);
  const float high_sum = quad_sum(read.y);
  float* to =
      block.a.logs.read +
      (static_cast<std::int64_t>(block.state) * gridDim.z + blockIdx.z) * block.a.shape.tokens +
      block.begin;
  if (lane_of_warp() % 4 == 0) {
    if (low < block.length) {
      to[low] = low_sum;
    }
    if (low + 8 < block.length) {
      to[low + 8] = high_sum;
    }
  }
}

__device__ inline void spread_terms(Terms all, const float (&terms)[kMlstmStrips][2][4], int row) {
  const int lane = lane_of_warp();
#pragma unroll
  for (int block = 0; block < kMlstmStrips; ++block) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        all[row + lane / 4 + i / 2 * 8][block * 16 + n * 8 + lane % 4 * 2 + i % 2] =
            terms[block][n][i];
      }
    }
  }
}

// A block for each 128 features of a chunk of one state: d_q, read, through and written.
template <int D>
__global__ void __launch_bounds__(kThreads) query_gradients_kernel(MlstmArrays<BFloat16> a) {
  constexpr int kColumns = kMlstmColumns<D>;
  extern __shared__ uint4 memory[];
  auto& s = *reinterpret_cast<QueryShared<D>*>(memory);
  const QueryTiles<D> tiles(reinterpret_cast<BFloat16*>(&s + 1));
  const MlstmBlock block(a, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y));
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / 32 * 16;
  const int feature = static_cast<int>(blockIdx.z) * kColumns;
  block.load_keys(tiles.keys, 0, thread, kThreads);
  block.load_values(tiles.values, 0, thread, kThreads);
  s.scalars.load(a.shape, a.scalars, block.chunk, block.state);
  __syncthreads();
  const bool carries = s.scalars.carry[0] != 0.0F;
  if (carries) {
    tiles.state.load_rounded(block.entering() + feature * D, D, kColumns, thread, kThreads);
    if (thread < kColumns) {
      s.normaliser[thread] = block.entering()[D * D + feature + thread];
    }
  }
  float terms[kMlstmStrips][2][4];
#pragma unroll
  for (int i = 0; i < kMlstmStrips; ++i) {
    clear(terms[i]);
  }
  float2 read = make_float2(0.0F, 0.0F);
  for (int reader = 0; reader < a.shape.readers; ++reader) {
    const int head = block.state * a.shape.readers + reader;
    block.load_head(tiles.queries, a.q, head, 0, thread, kThreads);
    block.load_head(tiles.d_reads, a.d_h, head, 0, thread, kThreads);
    block.load_scalars(head, s.inverse, s.delta);
    wait_copies();
    __syncthreads();
    float sums[kColumns / 8][4];
    clear(sums);
    if (carries) {
      const float2 part =
          read_states<D>(sums, s, tiles.d_reads, tiles.queries, tiles.state, row, feature);
      read.x += part.x;
      read.y += part.y;
    }
    read_tokens<D>(sums, terms, s, tiles, row, feature);
    store_rows(sums,
               tiles.queries,
               row,
               a.d_q + a.shape.head_row(block.begin, head) + feature,
               static_cast<std::int64_t>(a.shape.heads) * D,
               block.length);
    __syncthreads();
  }
  store_reads(block, read, row);
  if (blockIdx.z == 0) {
    spread_terms(tiles.terms(), terms, row);
    __syncthreads();
    differentiate_logs(a, tiles.terms(), block.chunk, block.state);
  }
}

template <int D>
void launch(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  allow_shared(query_gradients_kernel<D>, QueryShared<D>::bytes());
  const dim3 grid = mlstm_grid(a.shape, a.shape.states, D / kMlstmColumns<D>);
  query_gradients_kernel<D><<<grid, kThreads, QueryShared<D>::bytes(), stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
}

}  // namespace

int mma_mlstm_query_bytes(int dim) {
  int bytes = 0;
  with_mma_width(dim, [&](auto width) { bytes = QueryShared<width()>::bytes(); });
  return bytes;
}

void mma_mlstm_query_gradients(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  with_mma_width(a.shape.dim, [&](auto width) { launch<width()>(stream, a); });
}

}  // namespace bifocal
