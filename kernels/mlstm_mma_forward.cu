// The mLSTM's chunk sums and reads on tensor cores.
#include "kernels/mlstm_mma.cuh"

namespace bifocal {
namespace {

constexpr float kTiny = 1e-30F;

// Sums of outer products over a chunk: of keys and values, or of queries and gradients of reads.
// Rows of the left factor are scaled and rounded, and n is the sum of the same rounded rows, so
// that C / n stays a mean of values whatever the rounding.
template <int D>
struct SumsShared {
  static constexpr int kColumns = kMlstmColumns<D>;
  static constexpr int kTileBytes = SharedTile<kColumns>::bytes(kMlstmChunk);

  MlstmChunkScalars scalars;
  MlstmNormaliserColumns<kMlstmChunk> last;  // the right factor's last column
  float scale[kMlstmChunk];

  static constexpr int bytes() { return static_cast<int>(sizeof(SumsShared)) + 2 * kTileBytes; }
};

template <int D>
inline constexpr int kSumsThreads = kMlstmColumns<D> * 2;  // a warp for 16 features

template <int D>
__device__ void store_sums(const float (&sums)[kMlstmColumns<D> / 8][4],
                           const float (&last)[4],
                           float* own,
                           int feature,
                           int column) {
  const int lane = lane_of_warp();
  feature += lane / 4;
#pragma unroll
  for (int n = 0; n < kMlstmColumns<D> / 8; ++n) {
    const int at = column + n * 8 + lane % 4 * 2;
    store_vector<2>(own + feature * D + at, 0, Vector<float, 2>{{sums[n][0], sums[n][1]}});
    store_vector<2>(own + (feature + 8) * D + at, 0, Vector<float, 2>{{sums[n][2], sums[n][3]}});
  }
  if (column == 0 && lane % 4 == 0) {
    own[D * D + feature] = last[0] + last[1];
    own[D * D + feature + 8] = last[2] + last[3];
  }
}

// A block for each 128 x 128 (or D x D) of a chunk's sum.
template <int D, bool kReads>
__global__ void __launch_bounds__(kSumsThreads<D>) sums_kernel(MlstmArrays<BFloat16> a) {
  using Tile = SharedTile<kMlstmColumns<D>>;
  constexpr int kColumns = kMlstmColumns<D>;
  constexpr int kThreads = kSumsThreads<D>;
  extern __shared__ uint4 memory[];
  auto& s = *reinterpret_cast<SumsShared<D>*>(memory);
  const Tile left{reinterpret_cast<BFloat16*>(&s + 1)};
  const Tile right{left.at(kMlstmChunk, 0)};
  const int chunk = static_cast<int>(blockIdx.x);
  const int state = static_cast<int>(blockIdx.y);
  const int feature = static_cast<int>(blockIdx.z) / (D / kColumns) * kColumns;
  const int column = static_cast<int>(blockIdx.z) % (D / kColumns) * kColumns;
  const int begin = chunk * kMlstmChunk;
  const int length = a.shape.length(chunk);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = lane_of_warp();
  const int warp_feature = thread / 32 * 16;
  s.scalars.load(a.shape, a.scalars, chunk, state);
  __syncthreads();
  float sums[kColumns / 8][4];
  float last[1][4];
  clear(sums);
  clear(last);
  const int repeats = !kReads ? 1 : s.scalars.carry[0] == 0.0F ? 0 : a.shape.readers;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const int head = state * a.shape.readers + repeat;
    if (kReads) {
      const std::int64_t stride = static_cast<std::int64_t>(a.shape.heads) * D;
      left.load(a.q + a.shape.head_row(begin, head) + feature,
                stride,
                kMlstmChunk,
                length,
                thread,
                kThreads);
      right.load(a.d_h + a.shape.head_row(begin, head) + column,
                 stride,
                 kMlstmChunk,
                 length,
                 thread,
                 kThreads);
    } else {
      left.load(a.k + a.shape.key_row(begin, state) + feature,
                static_cast<std::int64_t>(a.shape.states) * D,
                kMlstmChunk,
                length,
                thread,
                kThreads);
      right.load(a.v + a.shape.value_row(begin, state / a.shape.holders) + column,
                 static_cast<std::int64_t>(a.shape.v_heads) * D,
                 kMlstmChunk,
                 length,
                 thread,
                 kThreads);
    }
    if (thread < kMlstmChunk) {
      float scale = s.scalars.write[thread];
      float extra = 1.0F;
      if (kReads) {
        const std::int64_t at = static_cast<std::int64_t>(head) * a.shape.tokens + begin + thread;
        const float inverse = thread < length ? a.inverse[at] : 1.0F;
        scale = s.scalars.carry[thread] * inverse;
        extra = thread < length ? a.delta[at] / inverse : 0.0F;  // the scale holds it already
      }
      s.scale[thread] = scale;
      s.last.high[thread] = store_as<BFloat16>(extra);
      s.last.low[thread] = store_as<BFloat16>(extra - load_float(s.last.high[thread]));
    }
    finish_copies();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kMlstmChunk; k += 16) {
      std::uint32_t operand[4];
      load_transposed(operand, left.by_columns(k, warp_feature));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = k + i / 2 * 8 + lane % 4 * 2;
        operand[i] = pack(s.scale[t] * low_of(operand[i]), s.scale[t + 1] * high_of(operand[i]));
      }
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += 2) {
        std::uint32_t b[4];
        load_transposed(b, right.by_rows(k, n * 8));
        multiply_add(sums[n], operand, b[0], b[1]);
        multiply_add(sums[n + 1], operand, b[2], b[3]);
      }
      std::uint32_t b0 = 0;
      std::uint32_t b1 = 0;
      s.last.operand(k, b0, b1);
      multiply_add(last[0], operand, b0, b1);
    }
    __syncthreads();
  }
  float* own = (kReads ? a.d_x : a.x) + a.shape.state_at(chunk, state);
  store_sums<D>(sums, last[0], own, feature + warp_feature, column);
}

template <int D>
struct ReadsShared {
  static constexpr int kColumns = kMlstmColumns<D>;

  MlstmChunkScalars scalars;
  MlstmNormaliserColumns<D> normaliser;

  static constexpr int bytes(int groups) {
    return static_cast<int>(sizeof(ReadsShared)) +
           SharedTile<D>::bytes((1 + groups) * kMlstmChunk) +
           SharedTile<kColumns>::bytes(kMlstmChunk + D);
  }
};

constexpr int kReadThreads = kMlstmStrips * 32;  // of one query head
constexpr int kReadGroups = 2;                   // query heads at a time

// A block for each 128 value columns of a chunk of one state, four warps for each query head.
template <int D>
__global__ void __launch_bounds__(kReadThreads* kReadGroups, D <= 128 ? 2 : 1)
    reads_kernel(MlstmArrays<BFloat16> a) {
  using Shared = ReadsShared<D>;
  constexpr int kColumns = kMlstmColumns<D>;
  extern __shared__ uint4 memory[];
  auto& s = *reinterpret_cast<Shared*>(memory);
  const SharedTile<D> keys{reinterpret_cast<BFloat16*>(&s + 1)};
  const SharedTile<kColumns> values{keys.at(kMlstmChunk, 0)};
  const SharedTile<kColumns> state_tile{values.at(kMlstmChunk, 0)};
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int groups = threads / kReadThreads;
  const int group = thread / kReadThreads;
  const int row = thread % kReadThreads / 32 * 16;
  const SharedTile<D> queries{SharedTile<D>{state_tile.at(D, 0)}.at(group * kMlstmChunk, 0)};
  const int chunk = static_cast<int>(blockIdx.x);
  const int state = static_cast<int>(blockIdx.y);
  const int column = static_cast<int>(blockIdx.z) * kColumns;
  const int begin = chunk * kMlstmChunk;
  const int length = a.shape.length(chunk);
  const float* x = a.x + a.shape.state_at(chunk, state);
  keys.load(a.k + a.shape.key_row(begin, state),
            static_cast<std::int64_t>(a.shape.states) * D,
            kMlstmChunk,
            length,
            thread,
            threads);
  values.load(a.v + a.shape.value_row(begin, state / a.shape.holders) + column,
              static_cast<std::int64_t>(a.shape.v_heads) * D,
              kMlstmChunk,
              length,
              thread,
              threads);
  s.scalars.load(a.shape, a.scalars, chunk, state);
  __syncthreads();
  const bool carries = s.scalars.carry[0] != 0.0F;
  if (carries) {
    state_tile.load_rounded(x + column, D, D, thread, threads);
    s.normaliser.load(x + D * D, thread, threads);
  }
  const int low = row + lane_of_warp() / 4;
  for (int first = 0; first < a.shape.readers; first += groups) {
    const int head = state * a.shape.readers + first + group;
    const bool active = first + group < a.shape.readers;
    if (active) {
      queries.load(a.q + a.shape.head_row(begin, head),
                   static_cast<std::int64_t>(a.shape.heads) * D,
                   kMlstmChunk,
                   length,
                   thread % kReadThreads,
                   kReadThreads);
    }
    finish_copies();
    __syncthreads();
    if (active) {
      float sums[kColumns / 8][4];
      float normaliser[1][4];
      clear(sums);
      clear(normaliser);
      if (carries) {
#pragma unroll 1
        for (int k = 0; k < D; k += 16) {
          std::uint32_t q[4];
          load_matrices(q, queries.by_rows(row, k));
#pragma unroll
          for (int n = 0; n < kColumns / 8; n += 2) {
            std::uint32_t b[4];
            load_transposed(b, state_tile.by_rows(k, n * 8));
            multiply_add(sums[n], q, b[0], b[1]);
            multiply_add(sums[n + 1], q, b[2], b[3]);
          }
          std::uint32_t b0 = 0;
          std::uint32_t b1 = 0;
          s.normaliser.operand(k, b0, b1);
          multiply_add(normaliser[0], q, b0, b1);
        }
      }
      float low_sum = 0.0F;
      float high_sum = 0.0F;
      spread_columns(normaliser[0], low_sum, high_sum);
      const float low_carry = s.scalars.carry[low];
      const float high_carry = s.scalars.carry[low + 8];
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        sums[n][0] *= low_carry;
        sums[n][1] *= low_carry;
        sums[n][2] *= high_carry;
        sums[n][3] *= high_carry;
      }
      const bool adds = lane_of_warp() % 4 == 0;  // one lane of a row
      float low_weights = adds ? low_carry * low_sum : 0.0F;
      float high_weights = adds ? high_carry * high_sum : 0.0F;
      for (int from = 0; from <= row; from += 16) {
        float p[2][4];
        std::uint32_t weights[4];
        multiply_rows(p, queries, row, keys, from);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int j = from + n * 8 + lane_of_warp() % 4 * 2;
          p[n][0] *= s.scalars.weight(low, j);
          p[n][1] *= s.scalars.weight(low, j + 1);
          p[n][2] *= s.scalars.weight(low + 8, j);
          p[n][3] *= s.scalars.weight(low + 8, j + 1);
        }
        pack_left(weights, p);
#pragma unroll
        for (int i = 0; i < 4; i += 2) {  // what is summed is what is multiplied
          low_weights += low_of(weights[i]) + high_of(weights[i]);
          high_weights += low_of(weights[i + 1]) + high_of(weights[i + 1]);
        }
        add_weighted_rows(sums, weights, values, from, 0);
      }
      const float low_factor = 1.0F / (sum_of_row(low_weights) + kTiny);
      const float high_factor = 1.0F / (sum_of_row(high_weights) + kTiny);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        sums[n][0] *= low_factor;
        sums[n][1] *= low_factor;
        sums[n][2] *= high_factor;
        sums[n][3] *= high_factor;
      }
      store_rows(sums,
                 queries,
                 row,
                 a.h_out + a.shape.head_row(begin, head) + column,
                 static_cast<std::int64_t>(a.shape.heads) * D,
                 length);
    }
    __syncthreads();
  }
}

// Scalars of reads for the backward pass: a block for each chunk of one state, as above.
template <int D>
__global__ void __launch_bounds__(kReadThreads* kReadGroups)
    read_scalars_kernel(MlstmArrays<BFloat16> a) {
  extern __shared__ uint4 memory[];
  auto& s = *reinterpret_cast<ReadsShared<D>*>(memory);
  const SharedTile<D> keys{reinterpret_cast<BFloat16*>(&s + 1)};
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int groups = threads / kReadThreads;
  const int group = thread / kReadThreads;
  const int row = thread % kReadThreads / 32 * 16;
  const SharedTile<D> queries{keys.at((1 + group) * kMlstmChunk, 0)};
  const int chunk = static_cast<int>(blockIdx.x);
  const int state = static_cast<int>(blockIdx.y);
  const int begin = chunk * kMlstmChunk;
  const int length = a.shape.length(chunk);
  keys.load(a.k + a.shape.key_row(begin, state),
            static_cast<std::int64_t>(a.shape.states) * D,
            kMlstmChunk,
            length,
            thread,
            threads);
  s.scalars.load(a.shape, a.scalars, chunk, state);
  __syncthreads();
  const bool carries = s.scalars.carry[0] != 0.0F;
  if (carries) {
    s.normaliser.load(a.x + a.shape.state_at(chunk, state) + D * D, thread, threads);
  }
  const int lane = lane_of_warp();
  const int low = row + lane / 4;
  for (int first = 0; first < a.shape.readers; first += groups) {
    const int head = state * a.shape.readers + first + group;
    const bool active = first + group < a.shape.readers;
    if (active) {
      queries.load(a.q + a.shape.head_row(begin, head),
                   static_cast<std::int64_t>(a.shape.heads) * D,
                   kMlstmChunk,
                   length,
                   thread % kReadThreads,
                   kReadThreads);
    }
    finish_copies();
    __syncthreads();
    if (active) {
      float normaliser[1][4];
      clear(normaliser);
      if (carries) {
#pragma unroll 4
        for (int k = 0; k < D; k += 16) {
          std::uint32_t q[4];
          std::uint32_t b0 = 0;
          std::uint32_t b1 = 0;
          load_matrices(q, queries.by_rows(row, k));
          s.normaliser.operand(k, b0, b1);
          multiply_add(normaliser[0], q, b0, b1);
        }
      }
      float low_sum = 0.0F;
      float high_sum = 0.0F;
      spread_columns(normaliser[0], low_sum, high_sum);
      float low_weights = 0.0F;
      float high_weights = 0.0F;
      for (int from = 0; from <= row; from += 16) {
        float p[2][4];
        multiply_rows(p, queries, row, keys, from);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int j = from + n * 8 + lane % 4 * 2;
          low_weights +=
              p[n][0] * s.scalars.weight(low, j) + p[n][1] * s.scalars.weight(low, j + 1);
          high_weights +=
              p[n][2] * s.scalars.weight(low + 8, j) + p[n][3] * s.scalars.weight(low + 8, j + 1);
        }
      }
      low_weights = sum_of_row(low_weights) + s.scalars.carry[low] * low_sum + kTiny;
      high_weights = sum_of_row(high_weights) + s.scalars.carry[low + 8] * high_sum + kTiny;
      // d_h . h of the warp's rows, eight numbers a lane, D / 8 lanes a row.
      for (int line = 0; line < 16; ++line) {
        const int t = row + line;
        float product = 0.0F;
        if (t < length && lane < D / 8) {
          const std::int64_t at = a.shape.head_row(begin + t, head);
          const auto h = load_vector<8>(a.h + at, lane);
          const auto d_h = load_vector<8>(a.d_h + at, lane);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            product += load_float(h.element[i]) * load_float(d_h.element[i]);
          }
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
          product += __shfl_xor_sync(0xffffffffU, product, distance);
        }
        if (t < length && lane == line % 8 * 4) {
          const float inverse = 1.0F / (line < 8 ? low_weights : high_weights);
          const std::int64_t at = static_cast<std::int64_t>(head) * a.shape.tokens + begin + t;
          a.inverse[at] = inverse;
          a.delta[at] = -inverse * product;
        }
      }
    }
    __syncthreads();
  }
}

template <int D, bool kReads>
void launch_sums(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  constexpr int kTiles = (D / kMlstmColumns<D>)*(D / kMlstmColumns<D>);
  allow_shared(sums_kernel<D, kReads>, SumsShared<D>::bytes());
  const dim3 grid(
      static_cast<unsigned>(a.shape.chunks), static_cast<unsigned>(a.shape.states), kTiles);
  sums_kernel<D, kReads><<<grid, kSumsThreads<D>, SumsShared<D>::bytes(), stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
}

int groups_of(const MlstmShape& shape, int most) {
  return shape.readers < most ? shape.readers : most;
}

template <int D>
void launch_reads(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  constexpr int kMostGroups = D <= 128 ? kReadGroups : 1;  // what sm_80's shared memory holds
  const int groups = groups_of(a.shape, kMostGroups);
  const int bytes = ReadsShared<D>::bytes(groups);
  allow_shared(reads_kernel<D>, ReadsShared<D>::bytes(kMostGroups));
  const dim3 grid(static_cast<unsigned>(a.shape.chunks),
                  static_cast<unsigned>(a.shape.states),
                  D / kMlstmColumns<D>);
  reads_kernel<D><<<grid, groups * kReadThreads, bytes, stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
}

template <int D>
void launch_read_scalars(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  const int groups = groups_of(a.shape, kReadGroups);
  const int bytes =
      static_cast<int>(sizeof(ReadsShared<D>)) + SharedTile<D>::bytes((1 + groups) * kMlstmChunk);
  allow_shared(read_scalars_kernel<D>,
               static_cast<int>(sizeof(ReadsShared<D>)) +
                   SharedTile<D>::bytes((1 + kReadGroups) * kMlstmChunk));
  const dim3 grid(static_cast<unsigned>(a.shape.chunks), static_cast<unsigned>(a.shape.states));
  read_scalars_kernel<D><<<grid, groups * kReadThreads, bytes, stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
}

}  // namespace

void mma_mlstm_sums(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  a.shape.dim == 64    ? launch_sums<64, false>(stream, a)
  : a.shape.dim == 128 ? launch_sums<128, false>(stream, a)
                       : launch_sums<256, false>(stream, a);
}

void mma_mlstm_reads(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  a.shape.dim == 64    ? launch_reads<64>(stream, a)
  : a.shape.dim == 128 ? launch_reads<128>(stream, a)
                       : launch_reads<256>(stream, a);
}

void mma_mlstm_read_gradients(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  if (a.shape.dim == 64) {
    launch_read_scalars<64>(stream, a);
    launch_sums<64, true>(stream, a);
  } else if (a.shape.dim == 128) {
    launch_read_scalars<128>(stream, a);
    launch_sums<128, true>(stream, a);
  } else {
    launch_read_scalars<256>(stream, a);
    launch_sums<256, true>(stream, a);
  }
}

}  // namespace bifocal
