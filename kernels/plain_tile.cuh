// A 64 x 64 tile of a matrix product on CUDA cores, for operands of any size and layout: what the
// float32 mode and unusual widths run on.
#pragma once

namespace bifocal {

inline constexpr int kTile = 64;          // rows and columns
inline constexpr int kTileThreads = 256;  // 16 x 16, each with 4 x 4 numbers
inline constexpr int kTileStep = 16;      // of the summed dimension in shared memory

struct PlainTileBuffers {
  float left[kTileStep][kTile + 4];
  float right[kTileStep][kTile + 4];
};

// One pair of buffers in a kernel, however many products it has.
__device__ inline PlainTileBuffers& plain_tile_buffers() {
  __shared__ PlainTileBuffers buffers;
  return buffers;
}

struct PlainTile {
  float sum[4][4];

  // This thread's first row and column.
  __device__ static int row() { return static_cast<int>(threadIdx.x) / 16 * 4; }

  __device__ static int column() { return static_cast<int>(threadIdx.x) % 16 * 4; }

  __device__ void clear() {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sum[r][c] = 0.0F;
      }
    }
  }

  // += sum over k < depth of a(row, k) b(k, column); the functions are called for all rows and
  // columns of the tile. Every thread of the block takes part; ends with a barrier.
  template <class A, class B>
  __device__ void add_product(int depth, const A& a, const B& b) {
    auto& [left, right] = plain_tile_buffers();
    const int thread = static_cast<int>(threadIdx.x);
    for (int begin = 0; begin < depth; begin += kTileStep) {
#pragma unroll
      for (int i = 0; i < kTile * kTileStep / kTileThreads; ++i) {
        const int item = thread + i * kTileThreads;
        const int k = item % kTileStep;
        const int line = item / kTileStep;
        left[k][line] = begin + k < depth ? a(line, begin + k) : 0.0F;
        right[k][line] = begin + k < depth ? b(begin + k, line) : 0.0F;
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kTileStep; ++k) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            sum[r][c] = fmaf(left[k][row() + r], right[k][column() + c], sum[r][c]);
          }
        }
      }
      __syncthreads();
    }
  }

  // visit(row, column, sum) for this thread's numbers.
  template <class Visit>
  __device__ void each(const Visit& visit) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        visit(row() + r, column() + c, sum[r][c]);
      }
    }
  }
};

}  // namespace bifocal
