// A thread's place in its warp; sums and maxima over the lanes of a warp or of an aligned part of
// one, in a fixed order. Every lane gets the result, unless said otherwise; all lanes
// of the warp must call.
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

// Count numbers of each lane, a power of two up to Lanes, each summed over the lanes: number k is
// then in the lanes from k * Lanes / Count on. Fewer exchanges than a warp_sum() for each.
template <int Lanes = kWarp, int Count>
__device__ float sums_over_lanes(float (&x)[Count]) {
  static_assert(Count <= Lanes);
  const int lane = lane_id();
  int half = Count / 2;
#pragma unroll
  for (int distance = Lanes / 2; distance > 0; distance /= 2) {
    const bool is_upper = (lane & distance) != 0;
    if (half > 0) {
#pragma unroll
      for (int k = 0; k < Count / 2; ++k) {
        if (k < half) {
          const float sent = is_upper ? x[k] : x[k + half];
          const float kept = is_upper ? x[k + half] : x[k];
          x[k] = kept + __shfl_xor_sync(kAllLanes, sent, distance);
        }
      }
    } else {
      x[0] += __shfl_xor_sync(kAllLanes, x[0], distance);
    }
    half /= 2;
  }
  return x[0];
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
