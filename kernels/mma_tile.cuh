// Products of tiles in shared memory on tensor cores.
#pragma once

#include "kernels/tensor_core.cuh"
#include "kernels/warp.cuh"

namespace bifocal {

__device__ inline int lane_of_warp() {
  return static_cast<int>(threadIdx.x) % 32;
}

__device__ inline float low_of(std::uint32_t pair) {
  return __uint_as_float(pair << 16);
}

__device__ inline float high_of(std::uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000U);
}

// Rows of kColumns bfloat16. The 16 bytes after each row put rows that are read together into
// different banks.
template <int kColumns>
struct SharedTile {
  static constexpr int kStride = kColumns + 8;

  BFloat16* data;

  static constexpr int bytes(int rows) { return rows * kStride * 2; }

  __device__ BFloat16* at(int row, int column) const { return data + row * kStride + column; }

  // Left operand from [m][k]; right one from [k][n], transposed: tiles n and n + 8.
  const __device__ BFloat16* by_rows(int row, int column) const {
    const int lane = lane_of_warp();
    return at(row + lane % 16, column + lane / 16 * 8);
  }

  // Left operand from [k][m], transposed; right one from [n][k]: tiles n and n + 8.
  const __device__ BFloat16* by_columns(int row, int column) const {
    const int lane = lane_of_warp();
    return at(row + lane % 8 + lane / 16 * 8, column + lane / 8 % 2 * 8);
  }

  // `rows` rows from global memory by threads [0, threads); `first` is the first row's first
  // number, rows lie `stride` apart, those past `valid` become zeros. Ends without a barrier.
  __device__ void load(const BFloat16* first,
                       std::int64_t stride,
                       int rows,
                       int valid,
                       int thread,
                       int threads) const {
    constexpr int kGroups = kColumns / 8;
#pragma unroll 2
    for (int item = thread; item < rows * kGroups; item += threads) {
      const int row = item / kGroups;
      const int column = item % kGroups * 8;
      const bool present = row < valid;
      copy_async(at(row, column), present ? first + row * stride + column : first, present);
    }
  }

  // Rows of float32, rounded.
  __device__ void load_rounded(
      const float* first, std::int64_t stride, int rows, int thread, int threads) const {
    constexpr int kGroups = kColumns / 4;
#pragma unroll 2  // sums of products wait in registers meanwhile
    for (int item = thread; item < rows * kGroups; item += threads) {
      const int row = item / kGroups;
      const int column = item % kGroups * 4;
      const auto x = load_vector<4>(first + row * stride + column, 0);
      Vector<std::uint32_t, 2> pairs;
      pairs.element[0] = pack_bfloat16(x.element[0], x.element[1]);
      pairs.element[1] = pack_bfloat16(x.element[2], x.element[3]);
      store_vector<2>(reinterpret_cast<std::uint32_t*>(at(row, column)), 0, pairs);
    }
  }
};

template <int N>
__device__ void clear(float (&sums)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[n][i] = 0.0F;
    }
  }
}

// sums = 16 rows of left times 16 rows of right, over their D columns.
template <int D>
__device__ void multiply_rows(float (&sums)[2][4],
                              const SharedTile<D>& left,
                              int left_row,
                              const SharedTile<D>& right,
                              int right_row) {
  clear(sums);
#pragma unroll 2  // whole, it holds more operands than the registers of two blocks allow
  for (int k = 0; k < D; k += 16) {
    std::uint32_t a[4];
    std::uint32_t b[4];
    load_matrices(a, left.by_rows(left_row, k));
    load_matrices(b, right.by_columns(right_row, k));
    multiply_add(sums[0], a, b[0], b[1]);
    multiply_add(sums[1], a, b[2], b[3]);
  }
}

// 16 x 16 sums as the left operand of the next product.
__device__ inline void pack_left(std::uint32_t (&a)[4], const float (&p)[2][4]) {
  a[0] = pack_bfloat16(p[0][0], p[0][1]);
  a[1] = pack_bfloat16(p[0][2], p[0][3]);
  a[2] = pack_bfloat16(p[1][0], p[1][1]);
  a[3] = pack_bfloat16(p[1][2], p[1][3]);
}

// sums += left [16, 16] times 16 rows of right, columns from `column`.
template <int N, int D>
__device__ void add_weighted_rows(float (&sums)[N][4],
                                  const std::uint32_t (&left)[4],
                                  const SharedTile<D>& right,
                                  int row,
                                  int column) {
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    std::uint32_t b[4];
    load_matrices_transposed(b, right.by_rows(row, column + n * 8));
    multiply_add(sums[n], left, b[0], b[1]);
    multiply_add(sums[n + 1], left, b[2], b[3]);
  }
}

// Rows g and g + 8 of a left operand, times their weights and rounded.
__device__ inline void scale_rows(std::uint32_t (&a)[4], float low_row, float high_row) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float weight = i % 2 == 0 ? low_row : high_row;
    a[i] = pack_bfloat16(weight * low_of(a[i]), weight * high_of(a[i]));
  }
}

// sums += 16 rows of left, each times its weight, times right [K, 8 N].
template <int N, int K, int C>
__device__ void add_scaled_product(float (&sums)[N][4],
                                   const SharedTile<K>& left,
                                   int left_row,
                                   const SharedTile<C>& right,
                                   float low_weight,
                                   float high_weight) {
#pragma unroll 2
  for (int k = 0; k < K; k += 16) {
    std::uint32_t a[4];
    load_matrices(a, left.by_rows(left_row, k));
    scale_rows(a, low_weight, high_weight);
    add_weighted_rows(sums, a, right, k, 0);
  }
}

// sums += 16 rows of left times right [K, 8 N].
template <int N, int K, int C>
__device__ void add_product(float (&sums)[N][4],
                            const SharedTile<K>& left,
                            int left_row,
                            const SharedTile<C>& right) {
#pragma unroll 2
  for (int k = 0; k < K; k += 16) {
    std::uint32_t a[4];
    load_matrices(a, left.by_rows(left_row, k));
    add_weighted_rows(sums, a, right, k, 0);
  }
}

// sums += 16 rows of left times the transpose of right [8 N, K].
template <int N, int K>
__device__ void add_product_transposed(float (&sums)[N][4],
                                       const SharedTile<K>& left,
                                       int left_row,
                                       const SharedTile<K>& right) {
#pragma unroll 2
  for (int k = 0; k < K; k += 16) {
    std::uint32_t a[4];
    load_matrices(a, left.by_rows(left_row, k));
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      std::uint32_t b[4];
      load_matrices(b, right.by_columns(n * 8, k));
      multiply_add(sums[n], a, b[0], b[1]);
      multiply_add(sums[n + 1], a, b[2], b[3]);
    }
  }
}

// Rounds this warp's 16 x 8 N sums into rows [row, row + 16) of a tile that no other warp uses,
// then writes them to global memory, 16 bytes a lane; rows past `valid` are left out.
template <int N, int D>
__device__ void store_rows(const float (&sums)[N][4],
                           const SharedTile<D>& tile,
                           int row,
                           BFloat16* first,
                           std::int64_t stride,
                           int valid) {
  const int lane = lane_of_warp();
  __syncwarp();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int column = n * 8 + lane % 4 * 2;
    *reinterpret_cast<std::uint32_t*>(tile.at(row + lane / 4, column)) =
        pack_bfloat16(sums[n][0], sums[n][1]);
    *reinterpret_cast<std::uint32_t*>(tile.at(row + lane / 4 + 8, column)) =
        pack_bfloat16(sums[n][2], sums[n][3]);
  }
  __syncwarp();
  for (int item = lane; item < 16 * N; item += 32) {
    const int line = row + item / N;
    const int column = item % N * 8;
    if (line < valid) {
      store_vector<8>(first + line * stride + column, 0, load_vector<8>(tile.at(line, column), 0));
    }
  }
}

}  // namespace bifocal
