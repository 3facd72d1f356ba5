// The mLSTM's sums over chunks on tensor cores: of states, and of their gradients.
#include "kernels/mlstm_mma.cuh"

namespace bifocal {
namespace {

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

// This repeat's scale of the left rows, and the right factor's last column.
template <int D, bool kReads>
__device__ void load_scale(SumsShared<D>& s, const MlstmBlock& block, int head) {
  const int t = static_cast<int>(threadIdx.x);
  if (t >= kMlstmChunk) {
    return;
  }
  float scale = s.scalars.write[t];
  float extra = 1.0F;
  if (kReads) {
    const std::int64_t at =
        static_cast<std::int64_t>(head) * block.a.shape.tokens + block.begin + t;
    const float inverse = t < block.length ? block.a.inverse[at] : 1.0F;
    scale = s.scalars.carry[t] * inverse;
    extra = t < block.length ? block.a.delta[at] / inverse : 0.0F;  // the scale holds it already
  }
  s.scale[t] = scale;
  s.last.high[t] = store_as<BFloat16>(extra);
  s.last.low[t] = store_as<BFloat16>(extra - load_float(s.last.high[t]));
}

// sums and last += a warp's 16 features of the scaled left rows, transposed, times the right ones.
template <int D>
__device__ void add_outer(float (&sums)[kMlstmColumns<D> / 8][4],
                          float (&last)[4],
                          const SumsShared<D>& s,
                          const SharedTile<kMlstmColumns<D>>& left,
                          const SharedTile<kMlstmColumns<D>>& right,
                          int warp_feature) {
#pragma unroll
  for (int k = 0; k < kMlstmChunk; k += 16) {
    std::uint32_t operand[4];
    std::uint32_t b0 = 0;
    std::uint32_t b1 = 0;
    load_matrices_transposed(operand, left.by_columns(k, warp_feature));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = k + i / 2 * 8 + lane_of_warp() % 4 * 2;
      operand[i] =
          pack_bfloat16(s.scale[t] * low_of(operand[i]), s.scale[t + 1] * high_of(operand[i]));
    }
    add_weighted_rows(sums, operand, right, k, 0);
    s.last.operand(k, b0, b1);
    multiply_add(last, operand, b0, b1);
  }
}

// A block for each 128 x 128 (or D x D) of a chunk's sum.
template <int D, bool kReads>
__global__ void __launch_bounds__(kSumsThreads<D>) sums_kernel(MlstmArrays<BFloat16> a) {
  constexpr int kColumns = kMlstmColumns<D>;
  constexpr int kThreads = kSumsThreads<D>;
  extern __shared__ uint4 memory[];
  auto& s = *reinterpret_cast<SumsShared<D>*>(memory);
  const SharedTile<kColumns> left{reinterpret_cast<BFloat16*>(&s + 1)};
  const SharedTile<kColumns> right{left.at(kMlstmChunk, 0)};
  const MlstmBlock block(a, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y));
  const int feature = static_cast<int>(blockIdx.z) / (D / kColumns) * kColumns;
  const int column = static_cast<int>(blockIdx.z) % (D / kColumns) * kColumns;
  const int thread = static_cast<int>(threadIdx.x);
  s.scalars.load(a.shape, a.scalars, block.chunk, block.state);
  __syncthreads();
  float sums[kColumns / 8][4];
  float last[1][4];
  clear(sums);
  clear(last);
  const int repeats = !kReads ? 1 : s.scalars.carry[0] == 0.0F ? 0 : a.shape.readers;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const int head = block.state * a.shape.readers + repeat;
    if (kReads) {
      block.load_head(left, a.q, head, feature, thread, kThreads);
      block.load_head(right, a.d_h, head, column, thread, kThreads);
    } else {
      block.load_keys(left, feature, thread, kThreads);
      block.load_values(right, column, thread, kThreads);
    }
    load_scale<D, kReads>(s, block, head);
    wait_copies();
    __syncthreads();
    add_outer<D>(sums, last[0], s, left, right, thread / 32 * 16);
    __syncthreads();
  }
  float* own = (kReads ? a.d_x : a.x) + a.shape.state_at(block.chunk, block.state);
  store_sums<D>(sums, last[0], own, feature + thread / 32 * 16, column);
}

template <int D, bool kReads>
void launch_sums(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  constexpr int kTiles = (D / kMlstmColumns<D>)*(D / kMlstmColumns<D>);
  constexpr int kBytes = SumsShared<D>::bytes();
  allow_shared(sums_kernel<D, kReads>, kBytes);
  const dim3 grid = mlstm_grid(a.shape, a.shape.states, kTiles);
  sums_kernel<D, kReads><<<grid, kSumsThreads<D>, kBytes, stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
}

}  // namespace

void mma_mlstm_sums(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  with_mma_width(a.shape.dim, [&](auto width) { launch_sums<width(), false>(stream, a); });
}

void mma_mlstm_read_sums(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  with_mma_width(a.shape.dim, [&](auto width) { launch_sums<width(), true>(stream, a); });
}

}  // namespace bifocal
