// Softmax features on the device: arguments of their kernels.
#pragma once

#include <cstdint>

#include "kernels/device_scratch.h"
#include "kernels/launch.cuh"

namespace bifocal {

// Tokens whose part of the weights' gradient one block sums.
inline constexpr int kFeatureMapSpan = 1024;

template <class T>
struct FeatureMapArrays {
  T* y_out;          // forward
  const T *d_y, *y;  // backward
  T* d_x;
  const T *x, *weight;
  std::int64_t tokens;
  int heads, x_heads, dim, span;

  __device__ int repeats() const { return heads / x_heads; }

  __device__ int x_head(int head) const { return head / repeats(); }

  __device__ std::int64_t row(std::int64_t t, int head) const { return (t * heads + head) * dim; }

  __device__ std::int64_t input_row(std::int64_t t, int own) const {
    return (t * x_heads + own) * dim;
  }

  // 0 past the ends.
  __device__ float input(std::int64_t t, int own, int i) const {
    return t < tokens && i < dim ? load_float(x[input_row(t, own) + i]) : 0.0F;
  }

  __device__ float weight_at(int head, int feature, int i) const {
    return feature < dim && i < dim
               ? load_float(weight[(static_cast<std::int64_t>(head) * dim + feature) * dim + i])
               : 0.0F;
  }
};

template <class T>
void plain_feature_map(CudaStream& stream, DeviceScratch& scratch, const FeatureMapArrays<T>& a);

// d_x, and the sums of d_weight over each span of tokens: parts [spans, heads, dim, dim].
template <class T>
void plain_feature_map_backward(CudaStream& stream,
                                DeviceScratch& scratch,
                                const FeatureMapArrays<T>& a,
                                float* parts);

// The same on tensor cores, where the width has such kernels, the pointers allow 16-byte accesses
// and the device has the shared memory.
bool has_mma_feature_map(const FeatureMapArrays<BFloat16>& a);
void mma_feature_map(CudaStream& stream, const FeatureMapArrays<BFloat16>& a);
void mma_feature_map_backward(CudaStream& stream,
                              DeviceScratch& scratch,
                              const FeatureMapArrays<BFloat16>& a,
                              float* parts);

// On Hopper, where has_mma_feature_map(): forward; the number of sums of d_weight over parts of the
// tokens; d_x and these sums [parts, heads, dim, dim]. d_x is rounded once for each head that reads
// an x.
void hopper_feature_map(CudaStream& stream, const FeatureMapArrays<BFloat16>& a);
std::int64_t hopper_feature_map_parts(const FeatureMapArrays<BFloat16>& a);
void hopper_feature_map_backward(CudaStream& stream,
                                 const FeatureMapArrays<BFloat16>& a,
                                 float* parts);

}  // namespace bifocal
