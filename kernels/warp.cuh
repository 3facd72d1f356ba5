// A thread's place in its warp; sums and maxima over the lanes of a warp or of an aligned part of
// one, in a fixed order. Every lane gets the result; all lanes of the warp must call.
#pragma once

#include <cuda_runtime.h>

namespace bifocal {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffU;

// Of the calling thread, in a block of one dimension.
__device__ inline int lane_id() {
  return static_cast<int>(threadIdx.x % kWarp);
}

__device__ inline int warp_id() {
  return static_cast<int>(threadIdx.x / kWarp);
}

// Lanes: a power of two up to 32.
template <int Lanes = kWarp, class T>
__device__ T warp_sum(T x) {
#pragma unroll
  for (int distance = Lanes / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(kAllLanes, x, distance);
  }
  return x;
}

template <int Lanes = kWarp>
__device__ float warp_max(float x) {
#pragma unroll
  for (int distance = Lanes / 2; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

// Over the four lanes that share rows of a tensor core's tile.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

}  // namespace bifocal
