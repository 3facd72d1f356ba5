// The mLSTM's reads on tensor cores: forward, and their scalars for the backward pass.
#include "kernels/mlstm_mma.cuh"

namespace bifocal {
namespace {

constexpr int kReadThreads = kMlstmStrips * 32;  // of one query head
constexpr int kReadGroups = 2;                   // query heads at a time

template <int D>
struct ReadsShared {
  static constexpr int kColumns = kMlstmColumns<D>;

  MlstmChunkScalars scalars;
  MlstmNormaliserColumns<D> normaliser;

  // Keys, queries of each group; for the reads themselves values and C too.
  static constexpr int scalars_bytes(int groups) {
    return static_cast<int>(sizeof(ReadsShared)) + SharedTile<D>::bytes((1 + groups) * kMlstmChunk);
  }

  static constexpr int bytes(int groups) {
    return scalars_bytes(groups) + SharedTile<kColumns>::bytes(kMlstmChunk + D);
  }
};

// Where a warp stands: its group of four warps works on one query head at a time.
struct Warp {
  int groups, group;
  int in_group;  // thread
  int row, low;  // first row, and the lane's: low and low + 8

  __device__ Warp()
      : groups(static_cast<int>(blockDim.x) / kReadThreads),
        group(static_cast<int>(threadIdx.x) / kReadThreads),
        in_group(static_cast<int>(threadIdx.x) % kReadThreads),
        row(in_group / 32 * 16),
        low(row + lane_of_warp() / 4) {}
};

// Weighs 16 products of a warp's reads with tokens [from, from + 16).
__device__ inline void weigh(float (&p)[2][4], const MlstmChunkScalars& s, int low, int from) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int j = from + n * 8 + lane_of_warp() % 4 * 2;
    p[n][0] *= s.weight(low, j);
    p[n][1] *= s.weight(low, j + 1);
    p[n][2] *= s.weight(low + 8, j);
    p[n][3] *= s.weight(low + 8, j + 1);
  }
}

// sums = u q^T C and the first parts of the normalisers of rows low and low + 8, u q . n, each in
// one of the four lanes that share the row.
template <int D>
__device__ float2 read_state(float (&sums)[kMlstmColumns<D> / 8][4],
                             const ReadsShared<D>& s,
                             const SharedTile<D>& queries,
                             const SharedTile<kMlstmColumns<D>>& state_tile,
                             const Warp& warp) {
  float normaliser[1][4];
  clear(normaliser);
#pragma unroll 1
  for (int k = 0; k < D; k += 16) {
    std::uint32_t q[4];
    std::uint32_t b0 = 0;
    std::uint32_t b1 = 0;
    load_matrices(q, queries.by_rows(warp.row, k));
    add_weighted_rows(sums, q, state_tile, k, 0);
    s.normaliser.operand(k, b0, b1);
    multiply_add(normaliser[0], q, b0, b1);
  }
  const float low_carry = s.scalars.carry[warp.low];
  const float high_carry = s.scalars.carry[warp.low + 8];
  scale_sums(sums, low_carry, high_carry);
  // Columns 0 and 1 are in lanes 0, 4, 8, ...
  return lane_of_warp() % 4 == 0 ? make_float2(low_carry * (normaliser[0][0] + normaliser[0][1]),
                                               high_carry * (normaliser[0][2] + normaliser[0][3]))
                                 : make_float2(0.0F, 0.0F);
}

// A warp's 16 reads of one head; `normaliser` as read_state leaves it.
template <int D>
__device__ void read_chunk(float (&sums)[kMlstmColumns<D> / 8][4],
                           float2 normaliser,
                           const ReadsShared<D>& s,
                           const SharedTile<D>& queries,
                           const SharedTile<D>& keys,
                           const SharedTile<kMlstmColumns<D>>& values,
                           const Warp& warp) {
  for (int from = 0; from <= warp.row; from += 16) {
    float p[2][4];
    std::uint32_t weights[4];
    multiply_rows(p, queries, warp.row, keys, from);
    weigh(p, s.scalars, warp.low, from);
    pack_left(weights, p);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {  // what is summed is what is multiplied
      normaliser.x += low_of(weights[i]) + high_of(weights[i]);
      normaliser.y += low_of(weights[i + 1]) + high_of(weights[i + 1]);
    }
    add_weighted_rows(sums, weights, values, from, 0);
  }
  scale_sums(sums,
             1.0F / (quad_sum(normaliser.x) + kMlstmFloatTiny),
             1.0F / (quad_sum(normaliser.y) + kMlstmFloatTiny));
}

// A block for each 128 value columns of a chunk of one state, four warps for each query head.
template <int D>
__global__ void __launch_bounds__(kReadThreads* kReadGroups, mlstm_blocks<D>())
    reads_kernel(MlstmArrays<BFloat16> a) {
  constexpr int kColumns = kMlstmColumns<D>;
  extern __shared__ uint4 memory[];
  auto& s = *reinterpret_cast<ReadsShared<D>*>(memory);
  const SharedTile<D> keys{reinterpret_cast<BFloat16*>(&s + 1)};
  const SharedTile<kColumns> values{keys.at(kMlstmChunk, 0)};
  const SharedTile<kColumns> state_tile{values.at(kMlstmChunk, 0)};
  const Warp warp;
  const SharedTile<D> queries{state_tile.at(D, 0) +
                              warp.group * kMlstmChunk * SharedTile<D>::kStride};
  const MlstmBlock block(a, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y));
  const int column = static_cast<int>(blockIdx.z) * kColumns;
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  block.load_keys(keys, 0, thread, threads);
  block.load_values(values, column, thread, threads);
  s.scalars.load(a.shape, a.scalars, block.chunk, block.state);
  __syncthreads();
  const bool carries = s.scalars.carry[0] != 0.0F;
  if (carries) {
    state_tile.load_rounded(block.entering() + column, D, D, thread, threads);
    s.normaliser.load(block.entering() + D * D, thread, threads);
  }
  for (int first = 0; first < a.shape.readers; first += warp.groups) {
    const int head = block.state * a.shape.readers + first + warp.group;
    const bool active = first + warp.group < a.shape.readers;
    if (active) {
      block.load_head(queries, a.q, head, 0, warp.in_group, kReadThreads);
    }
    wait_copies();
    __syncthreads();
    if (active) {
      float sums[kColumns / 8][4];
      float2 normaliser = make_float2(0.0F, 0.0F);
      clear(sums);
      if (carries) {
        normaliser = read_state<D>(sums, s, queries, state_tile, warp);
      }
      read_chunk<D>(sums, normaliser, s, queries, keys, values, warp);
      store_rows(sums,
                 queries,
                 warp.row,
                 a.h_out + a.shape.head_row(block.begin, head) + column,
                 static_cast<std::int64_t>(a.shape.heads) * D,
                 block.length);
    }
    __syncthreads();
  }
}

// The normalisers of a warp's reads of one head, rows low and low + 8, in all lanes of the row.
template <int D>
__device__ float2 normalisers(const ReadsShared<D>& s,
                              const SharedTile<D>& queries,
                              const SharedTile<D>& keys,
                              const Warp& warp,
                              bool carries) {
  float2 sum = make_float2(0.0F, 0.0F);
  if (carries) {
    float normaliser[1][4];
    clear(normaliser);
#pragma unroll 4
    for (int k = 0; k < D; k += 16) {
      std::uint32_t q[4];
      std::uint32_t b0 = 0;
      std::uint32_t b1 = 0;
      load_matrices(q, queries.by_rows(warp.row, k));
      s.normaliser.operand(k, b0, b1);
      multiply_add(normaliser[0], q, b0, b1);
    }
    if (lane_of_warp() % 4 == 0) {
      sum.x = s.scalars.carry[warp.low] * (normaliser[0][0] + normaliser[0][1]);
      sum.y = s.scalars.carry[warp.low + 8] * (normaliser[0][2] + normaliser[0][3]);
    }
  }
  for (int from = 0; from <= warp.row; from += 16) {
    float p[2][4];
    multiply_rows(p, queries, warp.row, keys, from);
    weigh(p, s.scalars, warp.low, from);
    sum.x += (p[0][0] + p[0][1]) + (p[1][0] + p[1][1]);
    sum.y += (p[0][2] + p[0][3]) + (p[1][2] + p[1][3]);
  }
  return make_float2(quad_sum(sum.x) + kMlstmFloatTiny, quad_sum(sum.y) + kMlstmFloatTiny);
}

// inverse and delta of a warp's reads: d_h . h row by row, eight numbers a lane.
template <int D>
__device__ void store_scalars(const MlstmBlock& block,
                              int head,
                              float2 normaliser,
                              const Warp& warp) {
  const MlstmArrays<BFloat16>& a = block.a;
  const int lane = lane_of_warp();
#pragma unroll 4
  for (int line = 0; line < 16; ++line) {
    const int t = warp.row + line;
    float product = 0.0F;
    if (t < block.length && lane < D / 8) {
      const std::int64_t at = a.shape.head_row(block.begin + t, head);
      const auto h = load_vector<8>(a.h + at, lane);
      const auto d_h = load_vector<8>(a.d_h + at, lane);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        product += load_float(h.element[i]) * load_float(d_h.element[i]);
      }
    }
    product = warp_sum(product);
    if (t < block.length && lane == line % 8 * 4) {  // this lane holds the row's normaliser
      const float inverse = 1.0F / (line < 8 ? normaliser.x : normaliser.y);
      const std::int64_t at = static_cast<std::int64_t>(head) * a.shape.tokens + block.begin + t;
      a.inverse[at] = inverse;
      a.delta[at] = -inverse * product;
    }
  }
}

// A block for each chunk of one state.
template <int D>
__global__ void __launch_bounds__(kReadThreads* kReadGroups)
    read_scalars_kernel(MlstmArrays<BFloat16> a) {
  extern __shared__ uint4 memory[];
  auto& s = *reinterpret_cast<ReadsShared<D>*>(memory);
  const SharedTile<D> keys{reinterpret_cast<BFloat16*>(&s + 1)};
  const Warp warp;
  const SharedTile<D> queries{keys.at((1 + warp.group) * kMlstmChunk, 0)};
  const MlstmBlock block(a, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y));
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  block.load_keys(keys, 0, thread, threads);
  s.scalars.load(a.shape, a.scalars, block.chunk, block.state);
  __syncthreads();
  const bool carries = s.scalars.carry[0] != 0.0F;
  if (carries) {
    s.normaliser.load(block.entering() + D * D, thread, threads);
  }
  for (int first = 0; first < a.shape.readers; first += warp.groups) {
    const int head = block.state * a.shape.readers + first + warp.group;
    const bool active = first + warp.group < a.shape.readers;
    if (active) {
      block.load_head(queries, a.q, head, 0, warp.in_group, kReadThreads);
    }
    wait_copies();
    __syncthreads();
    if (active) {
      store_scalars<D>(block, head, normalisers<D>(s, queries, keys, warp, carries), warp);
    }
    __syncthreads();
  }
}

int groups_of(const MlstmShape& shape, int most) {
  return shape.readers < most ? shape.readers : most;
}

template <int D>
void launch_reads(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  constexpr int kMostGroups = D <= 128 ? kReadGroups : 1;  // what sm_80's shared memory holds
  const int groups = groups_of(a.shape, kMostGroups);
  allow_shared(reads_kernel<D>, ReadsShared<D>::bytes(kMostGroups));
  const dim3 grid = mlstm_grid(a.shape, a.shape.states, D / kMlstmColumns<D>);
  reads_kernel<D>
      <<<grid, groups * kReadThreads, ReadsShared<D>::bytes(groups), stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
}

template <int D>
void launch_read_scalars(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  const int groups = groups_of(a.shape, kReadGroups);
  allow_shared(read_scalars_kernel<D>, ReadsShared<D>::scalars_bytes(kReadGroups));
  const dim3 grid = mlstm_grid(a.shape, a.shape.states, 1);
  read_scalars_kernel<D>
      <<<grid, groups * kReadThreads, ReadsShared<D>::scalars_bytes(groups), stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
}

}  // namespace

void mma_mlstm_reads(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  with_mma_width(a.shape.dim, [&](auto width) { launch_reads<width()>(stream, a); });
}

void mma_mlstm_read_gradients(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  with_mma_width(a.shape.dim, [&](auto width) { launch_read_scalars<width()>(stream, a); });
  mma_mlstm_read_sums(stream, a);
}

}  // namespace bifocal
