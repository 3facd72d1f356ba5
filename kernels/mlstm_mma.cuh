// What the mLSTM's tensor core kernels share: a chunk's scalars in shared memory and its weights.
#pragma once

#include <type_traits>

#include "kernels/mlstm_problem.cuh"
#include "kernels/mma_tile.cuh"

namespace bifocal {

inline constexpr int kMlstmStrips = kMlstmChunk / 16;  // warps that share a chunk's rows

// Value or feature columns of one block: what the registers of its warps hold.
template <int D>
inline constexpr int kMlstmColumns = D < 128 ? D : 128;

// Blocks of 256 threads on a multiprocessor. For sm_80 the compiler finds no way to hold 128
// columns in the 128 registers that two blocks leave a thread.
template <int D>
__host__ __device__ constexpr int mlstm_blocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return D < 128 ? 2 : 1;
#else
  return D <= 128 ? 2 : 1;
#endif
}

struct MlstmChunkScalars : MlstmChunkValues {
  // D_tj.
  __device__ float weight(int t, int j) const {
    const float x = exponent(t, j);
    return j <= t && j >= first[t] ? exp2_fast(x) : 0.0F;
  }
};

// A block's chunk of one state, and loads of its rows into tiles by threads [0, threads).
struct MlstmBlock {
  const MlstmArrays<BFloat16>& a;
  int chunk, state, begin, length;

  __device__ MlstmBlock(const MlstmArrays<BFloat16>& arrays, int chunk_index, int state_index)
      : a(arrays),
        chunk(chunk_index),
        state(state_index),
        begin(chunk_index * kMlstmChunk),
        length(arrays.shape.length(chunk_index)) {}

  // Of x [tokens, heads, dim], columns from `column`.
  template <int C>
  __device__ void load_head(const SharedTile<C>& tile,
                            const BFloat16* x,
                            int head,
                            int column,
                            int thread,
                            int threads) const {
    tile.load(x + a.shape.head_row(begin, head) + column,
              static_cast<std::int64_t>(a.shape.heads) * a.shape.dim,
              kMlstmChunk,
              length,
              thread,
              threads);
  }

  template <int C>
  __device__ void load_keys(const SharedTile<C>& tile, int column, int thread, int threads) const {
    tile.load(a.k + a.shape.key_row(begin, state) + column,
              static_cast<std::int64_t>(a.shape.states) * a.shape.dim,
              kMlstmChunk,
              length,
              thread,
              threads);
  }

  template <int C>
  __device__ void load_values(const SharedTile<C>& tile,
                              int column,
                              int thread,
                              int threads) const {
    tile.load(a.v + a.shape.value_row(begin, state / a.shape.holders) + column,
              static_cast<std::int64_t>(a.shape.v_heads) * a.shape.dim,
              kMlstmChunk,
              length,
              thread,
              threads);
  }

  // inverse and delta of a head's reads by threads [0, 64); 0 past the end.
  __device__ void load_scalars(int head, float* inverse, float* delta) const {
    const int t = static_cast<int>(threadIdx.x);
    if (t < kMlstmChunk) {
      const std::int64_t at = static_cast<std::int64_t>(head) * a.shape.tokens + begin + t;
      inverse[t] = t < length ? a.inverse[at] : 0.0F;
      delta[t] = t < length ? a.delta[at] : 0.0F;
    }
  }

  __device__ const float* entering() const { return a.x + a.shape.state_at(chunk, state); }

  __device__ const float* leaving() const { return a.d_x + a.shape.state_at(chunk, state); }
};

// n as two bfloat16 columns beside C, so that it enters products with 16 bits.
template <int D>
struct MlstmNormaliserColumns {
  BFloat16 high[D], low[D];

  __device__ void load(const float* n, int thread, int threads) {
    for (int i = thread; i < D; i += threads) {
      high[i] = store_as<BFloat16>(n[i]);
      low[i] = store_as<BFloat16>(n[i] - load_float(high[i]));
    }
  }

  // The right operand of rows k, k + 16: column 0 high, column 1 low, six of zeros.
  __device__ void operand(int k, std::uint32_t& b0, std::uint32_t& b1) const {
    const int lane = lane_of_warp();
    const int column = lane / 4;
    const BFloat16* from = (column == 0 ? high : low) + k + lane % 4 * 2;
    b0 = column < 2 ? *reinterpret_cast<const std::uint32_t*>(from) : 0U;
    b1 = column < 2 ? *reinterpret_cast<const std::uint32_t*>(from + 8) : 0U;
  }
};

// Each chunk's sum of the gradient of the state before it, after inverse and delta.
void mma_mlstm_read_sums(CudaStream& stream, const MlstmArrays<BFloat16>& a);

// d_q, read, through and written, and the shared memory that they take: the most of all kernels.
void mma_mlstm_query_gradients(CudaStream& stream, const MlstmArrays<BFloat16>& a);
int mma_mlstm_query_bytes(int dim);

template <int N>
__device__ void scale_sums(float (&sums)[N][4], float low_row, float high_row) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    sums[n][0] *= low_row;
    sums[n][1] *= low_row;
    sums[n][2] *= high_row;
    sums[n][3] *= high_row;
  }
}

// Calls function(std::integral_constant<int, width>{}) for a width that has kernels.
template <class Function>
void with_mma_width(int dim, Function&& function) {
  if (dim == 64) {
    function(std::integral_constant<int, 64>{});
  } else if (dim == 128) {
    function(std::integral_constant<int, 128>{});
  } else {
    function(std::integral_constant<int, 256>{});
  }
}

inline dim3 mlstm_grid(const MlstmShape& shape, int rows, int parts) {
  return dim3(static_cast<unsigned>(shape.chunks),
              static_cast<unsigned>(rows),
              static_cast<unsigned>(parts));
}

}  // namespace bifocal
