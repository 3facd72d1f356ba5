// One kernel for each form of Hopper's products and copies, for hopper_test.cpp.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "kernels/cuda_stream.h"

namespace bifocal::test {

inline constexpr int kProductRows = 64;
inline constexpr int kProductDepth = 128;

// Where the factors of a product d [64, n] = a b lie; depth is kProductDepth.
struct ProductForm {
  bool a_in_registers;
  bool a_by_columns;  // stored [depth, 64] instead of [64, depth]; not in registers
  bool b_by_columns;  // stored [depth, n] instead of [n, depth]
};

// n = 16, 32, 64, 96, 128, 192 or 256. Each result is 1 more than the product: sums go on from d.
void multiply_on_hopper(CudaStream& stream,
                        const ProductForm& form,
                        int n,
                        float* d,
                        const BFloat16* a,
                        const BFloat16* b);

// A tensor of rank 2 to 4 and a box of it, fastest dimension first; unused sizes are 1.
struct BoxCopy {
  int rank;
  std::int64_t size[4];
  int box[4];
  int start[4];
};

// The box, as it comes to shared memory.
void load_box_on_hopper(CudaStream& stream,
                        const BoxCopy& copy,
                        BFloat16* box,
                        const BFloat16* tensor);

// The reverse, rank 3: the box as it lies in shared memory to the tensor.
void store_box_on_hopper(CudaStream& stream,
                         const BoxCopy& copy,
                         BFloat16* tensor,
                         const BFloat16* box);

// y = x in pieces of 1024 bytes: a producer of few registers loads them into a ring of three,
// two warpgroups of many registers take turns at writing them.
void copy_through_ring_on_hopper(CudaStream& stream, BFloat16* y, const BFloat16* x, int pieces);

}  // namespace bifocal::test
