// Tensor cores of sm_80 and later: bfloat16 products of 16 x 8 x 16 with float32 sums, and tiles in
// shared memory that feed them.
//
// A lane holds of a 16 x 8 sum [row g: columns 2t, 2t + 1; row g + 8: the same], g = lane / 4 and
// t = lane % 4; of a 16 x 16 left operand pairs along its columns, of a 16 x 8 right one pairs
// along its rows.
#pragma once

#include <cstdint>

#include "kernels/vector.cuh"

namespace bifocal {

// sum += a b.
__device__ inline void multiply_add(float (&sum)[4],
                                    const std::uint32_t (&a)[4],
                                    std::uint32_t b0,
                                    std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void load_matrices(std::uint32_t (&to)[4], const BFloat16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

__device__ inline void load_transposed(std::uint32_t (&to)[4], const BFloat16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

// 16 bytes from global to shared memory, or zeros.
__device__ inline void copy_async(BFloat16* to, const BFloat16* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from),
                 "r"(valid ? 16 : 0)
               : "memory");
}

// This thread's copies are done; a barrier must follow before others read them.
__device__ inline void finish_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// 2^x to 2 roundoffs; 0 below -126.
__device__ inline float fast_exp2(float x) {
  float y = 0.0F;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace bifocal
