// The mLSTM's gradients on tensor cores. Queries: a warp holds 16 tokens t and walks over the keys
// they see. Keys and values: a warp holds 16 tokens j and walks over the reads that see them.
// Weights are made anew in both, which costs less than moving them through memory.
#include "kernels/mlstm_mma.cuh"

namespace bifocal {
namespace {

constexpr int kThreads = kMlstmStrips * 32;

// ---- queries ----

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

// A block for each 128 features of a chunk of one state: d_q, read, through and written.
template <int D>
__global__ void __launch_bounds__(kThreads) query_gradients_kernel(MlstmArrays<BFloat16> a) {
  constexpr int kColumns = kMlstmColumns<D>;
  extern __shared__ uint4 memory[];
  auto& s = *reinterpret_cast<QueryShared<D>*>(memory);
  const SharedTile<D> queries{reinterpret_cast<BFloat16*>(&s + 1)};
  const SharedTile<D> d_reads{queries.at(kMlstmChunk, 0)};
  const SharedTile<D> keys{d_reads.at(kMlstmChunk, 0)};
  const SharedTile<D> values{keys.at(kMlstmChunk, 0)};
  const SharedTile<D> state_tile{values.at(kMlstmChunk, 0)};
  static_assert(2 * kMlstmChunk * SharedTile<D>::kStride * sizeof(BFloat16) >=
                sizeof(float) * kMlstmChunk * (kMlstmChunk + 1));
  const auto all_terms = reinterpret_cast<Terms>(queries.data);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = lane_of_warp();
  const int row = thread / 32 * 16;
  const int low = row + lane / 4;
  const int chunk = static_cast<int>(blockIdx.x);
  const int state = static_cast<int>(blockIdx.y);
  const int feature = static_cast<int>(blockIdx.z) * kColumns;
  const int begin = chunk * kMlstmChunk;
  const int length = a.shape.length(chunk);
  const std::int64_t stride = static_cast<std::int64_t>(a.shape.heads) * D;
  keys.load(a.k + a.shape.key_row(begin, state),
            static_cast<std::int64_t>(a.shape.states) * D,
            kMlstmChunk,
            length,
            thread,
            kThreads);
  values.load(a.v + a.shape.value_row(begin, state / a.shape.holders),
              static_cast<std::int64_t>(a.shape.v_heads) * D,
              kMlstmChunk,
              length,
              thread,
              kThreads);
  s.scalars.load(a.shape, a.scalars, chunk, state);
  __syncthreads();
  const bool carries = s.scalars.carry[0] != 0.0F;
  if (carries) {
    const float* x = a.x + a.shape.state_at(chunk, state);
    state_tile.load_rounded(x + feature * D, D, kColumns, thread, kThreads);
    for (int i = thread; i < kColumns; i += kThreads) {
      s.normaliser[i] = x[D * D + feature + i];
    }
  }
  float terms[kMlstmStrips][2][4];
#pragma unroll
  for (int block = 0; block < kMlstmStrips; ++block) {
    clear(terms[block]);
  }
  float2 read = make_float2(0.0F, 0.0F);
  for (int reader = 0; reader < a.shape.readers; ++reader) {
    const int head = state * a.shape.readers + reader;
    const std::int64_t at = a.shape.head_row(begin, head);
    queries.load(a.q + at, stride, kMlstmChunk, length, thread, kThreads);
    d_reads.load(a.d_h + at, stride, kMlstmChunk, length, thread, kThreads);
    if (thread < kMlstmChunk) {
      const std::int64_t scalar = static_cast<std::int64_t>(head) * a.shape.tokens + begin + thread;
      s.inverse[thread] = thread < length ? a.inverse[scalar] : 0.0F;
      s.delta[thread] = thread < length ? a.delta[scalar] : 0.0F;
    }
    finish_copies();
    __syncthreads();
    float sums[kColumns / 8][4];
    clear(sums);
    if (carries) {
      const float2 part = read_states<D>(sums, s, d_reads, queries, state_tile, row, feature);
      read.x += part.x;
      read.y += part.y;
    }
#pragma unroll
    for (int block = 0; block < kMlstmStrips; ++block) {
      const int from = block * 16;
      if (from <= row) {
        float p[2][4];
        float g[2][4];
        std::uint32_t left[4];
        multiply_rows(p, queries, row, keys, from);
        multiply_rows(g, d_reads, row, values, from);
        differentiate_products<D>(left, terms[block], s, p, g, row, from);
        add_weighted_rows(sums, left, keys, from, feature);
      }
    }
    store_rows(sums, queries, row, a.d_q + at + feature, stride, length);
    __syncthreads();
  }
  read.x = sum_of_row(read.x);
  read.y = sum_of_row(read.y);
  if (lane % 4 == 0) {
    const std::int64_t at =
        (static_cast<std::int64_t>(state) * gridDim.z + blockIdx.z) * a.shape.tokens + begin;
    if (low < length) {
      a.logs.read[at + low] = read.x;
    }
    if (low + 8 < length) {
      a.logs.read[at + low + 8] = read.y;
    }
  }
  if (blockIdx.z != 0) {
    return;
  }
#pragma unroll
  for (int block = 0; block < kMlstmStrips; ++block) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        all_terms[low + i / 2 * 8][block * 16 + n * 8 + lane % 4 * 2 + i % 2] = terms[block][n][i];
      }
    }
  }
  __syncthreads();
  differentiate_logs(a, all_terms, chunk, state);
}

// ---- keys and values ----

// Blocks of the kernel below on a multiprocessor. For sm_80 the compiler finds no way to hold it in
// the 128 registers that two leave a thread.
template <int D>
__host__ __device__ constexpr int key_blocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return D < 128 ? 2 : 1;
#else
  return D <= 128 ? 2 : 1;
#endif
}

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
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffU, sum, distance);
  }
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

// A block for each 128 columns of a chunk of one value head. Four warps gather d_k, four d_v, which
// goes on over the states that hold the value head.
template <int D>
__global__ void __launch_bounds__(2 * kThreads, key_blocks<D>())
    key_gradients_kernel(MlstmArrays<BFloat16> a) {
  constexpr int kColumns = kMlstmColumns<D>;
  constexpr int kTile = kMlstmChunk * SharedTile<D>::kStride;
  extern __shared__ uint4 memory[];
  auto& s = *reinterpret_cast<KeyShared<D>*>(memory);
  const SharedTile<D> keys{reinterpret_cast<BFloat16*>(&s + 1)};
  const SharedTile<D> values{keys.at(kMlstmChunk, 0)};
  const SharedTile<D> queries{values.at(kMlstmChunk, 0)};
  const SharedTile<D> d_reads{queries.at(kMlstmChunk, 0)};
  const SharedTile<D> d_rows{queries.data};            // rows of dC for d_k
  const SharedTile<kColumns> d_columns{queries.data};  // columns of dC for d_v; the same at D = 128
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = lane_of_warp();
  const bool of_keys = thread < kThreads;
  const int row = thread % kThreads / 32 * 16;
  const int low = row + lane / 4;
  const int chunk = static_cast<int>(blockIdx.x);
  const int v_head = static_cast<int>(blockIdx.y);
  const int column = static_cast<int>(blockIdx.z) * kColumns;
  const int begin = chunk * kMlstmChunk;
  const int length = a.shape.length(chunk);
  const std::int64_t stride = static_cast<std::int64_t>(a.shape.heads) * D;
  const std::int64_t key_stride = static_cast<std::int64_t>(a.shape.states) * D;
  const std::int64_t value_stride = static_cast<std::int64_t>(a.shape.v_heads) * D;
  values.load(a.v + a.shape.value_row(begin, v_head),
              value_stride,
              kMlstmChunk,
              length,
              thread,
              2 * kThreads);
  float sums[kColumns / 8][4];
  clear(sums);
  for (int holder = 0; holder < a.shape.holders; ++holder) {
    const int state = v_head * a.shape.holders + holder;
    const float* x = a.x + a.shape.state_at(chunk, state);
    const float* d_x = a.d_x + a.shape.state_at(chunk, state);
    const std::int64_t part = static_cast<std::int64_t>(state) * gridDim.z + blockIdx.z;
    keys.load(
        a.k + a.shape.key_row(begin, state), key_stride, kMlstmChunk, length, thread, 2 * kThreads);
    s.scalars.load(a.shape, a.scalars, chunk, state);
    d_rows.load_rounded(d_x + column * D, D, kColumns, thread, 2 * kThreads);
    if (thread < kColumns) {
      s.normaliser[thread] = d_x[D * D + column + thread];
    }
    const float pass = a.scalars.pass[static_cast<std::int64_t>(state) * a.shape.chunks + chunk];
    float passed = 0.0F;
    if (pass != 0.0F) {
      passed = pass * product_of_states<D>(s, x, d_x, column);
    }
    if (thread == 0) {
      a.logs.passed[part * a.shape.chunks + chunk] = passed;
    }
    finish_copies();
    __syncthreads();
    if (of_keys) {
      clear(sums);
      const float2 left = leave_states<D>(sums, s, values, keys, d_rows, row, column);
      const float low_left = sum_of_row(left.x);
      const float high_left = sum_of_row(left.y);
      if (lane % 4 == 0) {
        if (low < length) {
          a.logs.left[part * a.shape.tokens + begin + low] = low_left;
        }
        if (low + 8 < length) {
          a.logs.left[part * a.shape.tokens + begin + low + 8] = high_left;
        }
      }
    }
    if constexpr (kColumns < D) {
      __syncthreads();
      d_columns.load_rounded(d_x + column, D, D, thread, 2 * kThreads);
      __syncthreads();
    }
    if (!of_keys) {
      add_scaled_product(
          sums, keys, row, d_columns, s.scalars.write[low], s.scalars.write[low + 8]);
    }
    __syncthreads();
    for (int reader = 0; reader < a.shape.readers; ++reader) {
      const int head = state * a.shape.readers + reader;
      const std::int64_t at = a.shape.head_row(begin, head);
      queries.load(a.q + at, stride, kMlstmChunk, length, thread, 2 * kThreads);
      d_reads.load(a.d_h + at, stride, kMlstmChunk, length, thread, 2 * kThreads);
      if (thread < kMlstmChunk) {
        const std::int64_t scalar =
            static_cast<std::int64_t>(head) * a.shape.tokens + begin + thread;
        s.inverse[thread] = thread < length ? a.inverse[scalar] : 0.0F;
        s.delta[thread] = thread < length ? a.delta[scalar] : 0.0F;
      }
      finish_copies();
      __syncthreads();
      const SharedTile<D> own{keys.data + (of_keys ? kTile : 0)};
      const SharedTile<D> reads{queries.data + (of_keys ? kTile : 0)};
      const SharedTile<D> gathered{queries.data + (of_keys ? 0 : kTile)};
      for (int from = row; from < kMlstmChunk; from += 16) {
        float p[2][4];
        std::uint32_t left[4];
        multiply_rows(p, own, row, reads, from);
        weigh_reads<D>(left, p, s, of_keys, row, from);
        add_weighted_rows(sums, left, gathered, from, column);
      }
      __syncthreads();
    }
    if (of_keys) {
      store_rows(
          sums, queries, row, a.d_k + a.shape.key_row(begin, state) + column, key_stride, length);
    }
    __syncthreads();
  }
  if (!of_keys) {
    store_rows(sums,
               d_reads,
               row,
               a.d_v + a.shape.value_row(begin, v_head) + column,
               value_stride,
               length);
  }
}

template <int D>
void launch(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  constexpr unsigned kParts = D / kMlstmColumns<D>;
  const auto chunks = static_cast<unsigned>(a.shape.chunks);
  allow_shared(query_gradients_kernel<D>, QueryShared<D>::bytes());
  allow_shared(key_gradients_kernel<D>, KeyShared<D>::bytes());
  query_gradients_kernel<D><<<dim3(chunks, static_cast<unsigned>(a.shape.states), kParts),
                              kThreads,
                              QueryShared<D>::bytes(),
                              stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
  key_gradients_kernel<D><<<dim3(chunks, static_cast<unsigned>(a.shape.v_heads), kParts),
                            2 * kThreads,
                            KeyShared<D>::bytes(),
                            stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
}

// The most shared memory that the kernels of a width take.
int shared_bytes(int dim) {
  return dim == 64    ? QueryShared<64>::bytes()
         : dim == 128 ? QueryShared<128>::bytes()
                      : QueryShared<256>::bytes();
}

}  // namespace

bool has_mma_mlstm(const MlstmArrays<BFloat16>& a, bool backward) {
  const int dim = a.shape.dim;
  if ((dim != 64 && dim != 128 && dim != 256) || !is_aligned(16, a.q, a.k, a.v, a.h_out)) {
    return false;
  }
  if (!backward) {
    return true;
  }
  return shared_bytes(dim) <= most_shared_bytes() &&
         is_aligned(16, a.h, a.d_h, a.d_q, a.d_k, a.d_v);
}

int mma_mlstm_parts(int dim) {
  return dim == 256 ? 2 : 1;
}

void mma_mlstm_gradients(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  a.shape.dim == 64    ? launch<64>(stream, a)
  : a.shape.dim == 128 ? launch<128>(stream, a)
                       : launch<256>(stream, a);
}

}  // namespace bifocal
