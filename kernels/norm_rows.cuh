// Rows that lanes of a warp keep in registers while they norm them: the same sums, hence the same
// bits, in every kernel that norms rows so.
#pragma once

#include <cstdint>

#include "kernels/vector.cuh"
#include "kernels/warp.cuh"

namespace bifocal {

// Elements added up in a group first, groups after: short chains keep the error small.
template <class T>
__device__ float sum_of_squares(const Packed<T>& x) {
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kVectorSize<T>; ++i) {
    sum = fmaf(x[i], x[i], sum);
  }
  return sum;
}

// 1 / rms of a row whose groups the lanes hold, V of them each. All lanes of the warp must call.
template <int Lanes, int V, class T>
__device__ float inverse_rms(const Packed<T> (&x)[V], float width, float eps) {
  float sum = 0.0F;
#pragma unroll
  for (int k = 0; k < V; ++k) {
    sum += sum_of_squares(x[k]);
  }
  return 1.0F / sqrtf(warp_sum<Lanes>(sum) / width + eps);
}

template <class T>
__device__ Packed<T> normed(const Packed<T>& x, float inverse, const Packed<T>& weight) {
  float y[kVectorSize<T>];
#pragma unroll
  for (int i = 0; i < kVectorSize<T>; ++i) {
    y[i] = x[i] * inverse * weight[i];
  }
  return Packed<T>::of(y);
}

}  // namespace bifocal
