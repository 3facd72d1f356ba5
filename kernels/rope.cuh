// The rotation of a pair of elements, the same bits in every kernel.
#pragma once

#include <cuda_runtime.h>

namespace bifocal {

struct Pair {
  float low, high;
};

__device__ inline Pair rotated(const Pair& x, float cos, float sin) {
  return {fmaf(x.low, cos, -__fmul_rn(x.high, sin)), fmaf(x.high, cos, __fmul_rn(x.low, sin))};
}

}  // namespace bifocal
