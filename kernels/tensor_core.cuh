// Warp-wide matrix products of bfloat16 and what feeds them, for compute capability 8.0 and later.
//
// multiply_add is one m16n8k16 product. With g = lane / 4 and i = 2 (lane % 4), a lane holds
//   of A [16, 16]: (g, i), (g + 8, i), (g, i + 8), (g + 8, i + 8), each with its right neighbour;
//   of B [16, 8]: (i, g), (i + 8, g), each with its neighbour below;
//   of C [16, 8]: (g, i), (g, i + 1), (g + 8, i), (g + 8, i + 1).
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "kernels/vector.cuh"

namespace bifocal {

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// Elements in shared memory under their 32-bit address.
class SharedElements {
 public:
  __device__ explicit SharedElements(const BFloat16* first) : address_(shared_address(first)) {}

  __device__ std::uint32_t address(int element) const {
    return address_ + static_cast<std::uint32_t>(element) * sizeof(BFloat16);
  }

 private:
  std::uint32_t address_;
};

// Four 8x8 matrices from shared memory. Lane l names row l % 8 of matrix l / 8 by the address of
// its first element: 16 aligned bytes. A lane gets elements (lane / 4, 2 (lane % 4)) and the right
// neighbour of each.
__device__ inline void load_matrices(std::uint32_t (&to)[4], std::uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

// The same of the transposed matrices.
__device__ inline void load_matrices_transposed(std::uint32_t (&to)[4], std::uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

__device__ inline void load_matrices(std::uint32_t (&to)[4], const BFloat16* row) {
  load_matrices(to, shared_address(row));
}

__device__ inline void load_matrices_transposed(std::uint32_t (&to)[4], const BFloat16* row) {
  load_matrices_transposed(to, shared_address(row));
}

__device__ inline void load_matrices(std::uint32_t (&to)[4],
                                     const SharedElements& from,
                                     int element) {
  load_matrices(to, from.address(element));
}

__device__ inline void load_matrices_transposed(std::uint32_t (&to)[4],
                                                const SharedElements& from,
                                                int element) {
  load_matrices_transposed(to, from.address(element));
}

// c += a b
__device__ inline void multiply_add(float (&c)[4],
                                    const std::uint32_t (&a)[4],
                                    std::uint32_t b0,
                                    std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes from global to shared memory, done by the time of a wait; zeros where not valid.
__device__ inline void copy_async(BFloat16* to, const BFloat16* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(valid ? 16 : 0)
               : "memory");
}

// The same of 4 bytes.
template <class T>
__device__ void copy_word_async(T* to, const T* from, bool valid) {
  static_assert(sizeof(T) == 4);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               :
               : "r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(valid ? 4 : 0)
               : "memory");
}

// This thread's copies are done. Those of others are after the next barrier.
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_all;" : : : "memory");
}

// 2^x to 2 units in the last place; 0 for -infinity.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The block's dynamic shared memory.
__device__ inline unsigned char* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char dynamic_shared_memory[];
  return dynamic_shared_memory;
}

}  // namespace bifocal
