// What the kernels of the mLSTM's backward pass on Hopper share. bfloat16, head widths 64 and 128.
//
// A block is one warpgroup and takes one chunk; two blocks share a multiprocessor, so that one
// computes weights while the other's products run. States lie in memory rounded and swizzled, as
// the copy engine is to bring them. Order of kernels:
//   sums of chunks -> states before chunks -> gradients of queries, 1 / N and delta of reads
//   -> sums of chunks' gradients -> gradients of states after chunks -> gradients of keys, values.
// N and delta = -d_h . h / N come from the same products as the gradients, so h is not read.
#pragma once

#include "kernels/mlstm_hopper.cuh"
#include "kernels/mlstm_mma.cuh"

namespace bifocal {

// States that the scan leaves between chunks: c [chunks, states, dim, dim], swizzled tiles;
// n [chunks, states, dim].
struct MlstmRoundedStates {
  BFloat16* c;
  float* n;
};

// Of the reads of a chunk by one query head; zeros past the row's end.
struct MlstmReadScalars {
  float inverse[kMlstmChunk];
  float delta[kMlstmChunk];
};

// What scales rows of a chunk in a sum of outer products for [C, n], and the same rows' weight in n
// beside that; zeros past the row's end.
struct alignas(16) MlstmRowScales {
  float scale[kMlstmChunk];
  float extra[kMlstmChunk];
  float pass;  // what a state keeps across the chunk
};

// a.x, a.d_x, a.h, a.inverse and a.delta are not used; a.logs has one part of each.
struct HopperMlstm {
  MlstmArrays<BFloat16> a;
  CUtensorMap q, k, v, d_h;
  MlstmRoundedStates entering, leaving;  // states, and gradients of those after chunks
  MlstmReadScalars* reads;               // [heads, chunks]
  MlstmRowScales* read_scales;           // [heads, chunks], of queries for gradients of states
  MlstmRowScales* write_scales;          // [states, chunks], of keys for states
};

// Whether kernels, device, width and pointers allow the backward pass on Hopper.
bool has_hopper_mlstm_backward(const MlstmArrays<BFloat16>& a);
HopperMlstm plan_hopper_mlstm(DeviceScratch& scratch, const MlstmArrays<BFloat16>& a);
// All of it but the gates' gradients, which come from a.logs.
void hopper_mlstm_backward(CudaStream& stream,
                           DeviceScratch& scratch,
                           const HopperMlstm& m,
                           const MlstmScanTargets& states,
                           const MlstmScanTargets& gradients);

namespace hopper {

// Its stages in order.
void mlstm_write_scales(CudaStream& stream, const HopperMlstm& m);
// States before chunks and after the row.
void mlstm_states(CudaStream& stream,
                  DeviceScratch& scratch,
                  const HopperMlstm& m,
                  const MlstmScanTargets& targets);
// d_q, the scalars of reads and what gates get of them.
void mlstm_query_gradients(CudaStream& stream, const HopperMlstm& m);
// Gradients of states after chunks and before the row.
void mlstm_state_gradients(CudaStream& stream,
                           DeviceScratch& scratch,
                           const HopperMlstm& m,
                           const MlstmScanTargets& targets);
// d_k, d_v and what gates get of them.
void mlstm_key_gradients(CudaStream& stream, const HopperMlstm& m);

// Rows of a chunk of one head as a tile.
template <int D>
__device__ void load_chunk(
    BFloat16* to, const CUtensorMap& map, Barrier& full, int head, int chunk) {
#pragma unroll
  for (int column = 0; column < D; column += kSwizzleColumns) {
    load_box(to + kMlstmChunk * column, map, full, column, head, chunk * kMlstmChunk);
  }
}

// This thread's first row of a chunk; the other is eight further on.
__device__ inline int chunk_row() {
  return static_cast<int>(threadIdx.x) / 32 * 16 + lane_of_warp() / 4;
}

// This thread's first column in each eight; the other is its neighbour.
__device__ inline int pair_column() {
  return lane_of_warp() % 4 * 2;
}

// Sum i of a [64, 8 n] product: its row and column.
__device__ inline int sum_row(int i) {
  return chunk_row() + i % 4 / 2 * 8;
}

__device__ inline int sum_column(int i) {
  return i / 4 * 8 + pair_column() + i % 2;
}

// A product of 64 columns, rounded, as the left factor of the next one.
__device__ inline void pack_factor(std::uint32_t (&factor)[kMlstmChunk / 16][4],
                                   const float (&s)[kMlstmChunk / 2]) {
#pragma unroll
  for (int i = 0; i < kMlstmChunk / 4; ++i) {
    factor[i / 4][i % 4] = pack_bfloat16(s[2 * i], s[2 * i + 1]);
  }
}

// s = left right^T of two tiles of a chunk.
template <int D>
__device__ void multiply_chunks(float (&s)[kMlstmChunk / 2],
                                const BFloat16* left,
                                const BFloat16* right) {
  const Operand a = Operand::by_rows(left);
  const Operand b = Operand::by_rows(right);
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    const int at = row_step(kMlstmChunk, step);
    multiply<false, false>(s, a + at, b + at, step > 0);
  }
}

// sums = tile of a chunk times the transpose of a state.
template <int D>
__device__ void multiply_state_transposed(float (&sums)[D / 2],
                                          const BFloat16* tile,
                                          const BFloat16* state) {
  const Operand a = Operand::by_rows(tile);
  const Operand b = Operand::by_rows(state);
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    multiply<false, false>(sums, a + row_step(kMlstmChunk, step), b + row_step(D, step), step > 0);
  }
}

// sums += factor times a tile of a chunk.
template <int D>
__device__ void add_rows(float (&sums)[D / 2],
                         const std::uint32_t (&factor)[kMlstmChunk / 16][4],
                         const BFloat16* tile) {
  const Operand b = Operand::by_columns(tile, kMlstmChunk);
#pragma unroll
  for (int step = 0; step < kMlstmChunk / 16; ++step) {
    multiply<true>(sums, factor[step], b + column_step(step), true);
  }
}

// The neighbours at sums 2 i and 2 i + 1 of a [64, D] product, in a tile of a chunk.
__device__ inline std::uint32_t pair_of(const BFloat16* tile, int i) {
  const int at = swizzled_offset(kMlstmChunk, chunk_row() + i % 2 * 8, i / 2 * 8) + pair_column();
  return *reinterpret_cast<const std::uint32_t*>(tile + at);
}

// Rounds [64, D] sums and stores rows below `length`, `stride` apart. Four lanes hold two columns
// each of eight; after trading among four such groups a lane has 16 bytes of one of them.
template <int D>
__device__ void store_chunk(const float (&sums)[D / 2],
                            BFloat16* first,
                            std::int64_t stride,
                            int length) {
  const int lane = lane_of_warp();
  const bool odd = lane % 2 == 1;
  const bool upper = lane % 4 >= 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = chunk_row() + half * 8;
#pragma unroll
    for (int j = 0; j < D / 8; j += 4) {
      std::uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (j + i) + 2 * half;
        w[i] = pack_bfloat16(sums[at], sums[at + 1]);
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const std::uint32_t got = __shfl_xor_sync(kAllLanes, odd ? w[i] : w[i + 1], 1);
        (odd ? w[i] : w[i + 1]) = got;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const std::uint32_t got = __shfl_xor_sync(kAllLanes, upper ? w[i] : w[i + 2], 2);
        (upper ? w[i] : w[i + 2]) = got;
      }
      if (row < length) {
        BFloat16* to = first + row * stride + (j + lane % 4) * 8;
        *reinterpret_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
  }
}

// Numbers of a thread's two rows, the same in the four lanes that share them, to the chunk's rows
// below `length`.
__device__ inline void store_row_numbers(const float (&number)[2], float* to, int length) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = chunk_row() + half * 8;
    if (lane_of_warp() % 4 == 0 && row < length) {
      to[row] = number[half];
    }
  }
}

}  // namespace hopper
}  // namespace bifocal
