// What the kernels of decode products have in common.
#pragma once

#include <cstdint>

#include "kernels/cuda_stream.h"
#include "kernels/vector.cuh"
#include "ops/decode_layer.h"

namespace bifocal {

// One matrix among the outputs of a launch: outputs [begin, begin + out).
template <class T, class W>
struct ProductPart {
  void* y;
  const W* weight;
  const T* bias;
  const void* add;
  int begin, out;
  bool is_wide;  // y and add are float32
};

template <class T, class W>
struct ProductArgs {
  ProductPart<T, W> part[DecodeProducts::kMost];
  const T *x, *norm;
  const W *gate, *up;  // gated: instead of parts
  T* gated;
  int parts, rows, in, outputs, tasks;  // tasks: of the portable kernel
  float eps;
};

// Rows of x of this many numbers, a multiple of 16 bytes, that go together on the current device if
// it is a Hopper that takes them; else 0.
std::int64_t hopper_product_rows(std::int64_t in);

// At most that many rows; x, norm and weights lie on multiples of 16 bytes.
void hopper_products(CudaStream& stream,
                     const ProductArgs<BFloat16, BFloat16>& args,
                     bool is_gated);

}  // namespace bifocal
