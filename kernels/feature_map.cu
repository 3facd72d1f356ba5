// Softmax features: the choice of kernels, and the last sum of the weights' gradient.
#include <type_traits>

#include "kernels/feature_map.cuh"
#include "kernels/kernel_choice.h"
#include "ops/feature_map.h"

namespace bifocal {
namespace {

// d_weight += the sum of parts, in their order.
template <class W>
__global__ void __launch_bounds__(kBlockThreads)
    add_parts_kernel(W* d_weight, const float* parts, std::int64_t size, std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  if (i >= size) {
    return;
  }
  float sum = 0.0F;
  for (std::int64_t part = 0; part < count; ++part) {
    sum += parts[part * size + i];
  }
  d_weight[i] = store_as<W>(load_float(d_weight[i]) + sum);
}

void map(CudaStream& stream, DeviceScratch& scratch, const FeatureMapArrays<float>& a) {
  plain_feature_map(stream, scratch, a);
}

void map(CudaStream& stream, DeviceScratch& scratch, const FeatureMapArrays<BFloat16>& a) {
  if (!has_mma_feature_map(a)) {
    plain_feature_map(stream, scratch, a);
  } else if (use_hopper_kernels()) {
    hopper_feature_map(stream, a);
  } else {
    mma_feature_map(stream, a);
  }
}

// Sums of d_weight over parts of the tokens.
struct WeightParts {
  const float* sums;  // [count, heads, dim, dim]
  std::int64_t count;
};

template <class T>
WeightParts differentiate(CudaStream& stream,
                          DeviceScratch& scratch,
                          const FeatureMapArrays<T>& a) {
  constexpr bool kHasProducts = std::is_same_v<T, BFloat16>;  // on tensor cores
  const std::int64_t size = static_cast<std::int64_t>(a.heads) * a.dim * a.dim;
  if constexpr (kHasProducts) {
    if (has_mma_feature_map(a) && use_hopper_kernels()) {
      const std::int64_t count = hopper_feature_map_parts(a);
      auto* parts = scratch.take<float>(count * size);
      hopper_feature_map_backward(stream, a, parts);
      return {parts, count};
    }
  }
  const std::int64_t count = ceil_div(a.tokens, a.span);
  auto* parts = scratch.take<float>(count * size);
  if constexpr (kHasProducts) {
    if (has_mma_feature_map(a)) {
      mma_feature_map_backward(stream, scratch, a, parts);
      return {parts, count};
    }
  }
  plain_feature_map_backward(stream, scratch, a, parts);
  return {parts, count};
}

template <class T>
FeatureMapArrays<T> arrays_of(const ConstTensorView& y,
                              const ConstTensorView& x,
                              const ConstTensorView& weight) {
  FeatureMapArrays<T> a{};
  a.x = x.as<T>();
  a.weight = weight.as<T>();
  a.tokens = y.shape[0];
  a.heads = static_cast<int>(y.shape[1]);
  a.x_heads = static_cast<int>(x.shape[1]);
  a.dim = static_cast<int>(y.shape[2]);
  a.span = kFeatureMapSpan;
  return a;
}

template <class T>
void backward(CudaStream& stream, const FeatureMapBackward& op) {
  DeviceScratch scratch(stream);
  FeatureMapArrays<T> a = arrays_of<T>(op.y, op.x, op.weight);
  a.y = op.y.as<T>();
  a.d_y = op.d_y.as<T>();
  a.d_x = op.d_x.as<T>();
  const std::int64_t size = op.weight.size();
  const WeightParts parts = differentiate(stream, scratch, a);
  dispatch_device("feature_map backward", op.d_weight.dtype, [&](auto zero) {
    using W = decltype(zero);
    add_parts_kernel<W>
        <<<grid_of(ceil_div(size, kBlockThreads)), kBlockThreads, 0, stream.handle()>>>(
            op.d_weight.as<W>(), parts.sums, size, parts.count);
    BIFOCAL_CUDA(cudaGetLastError());
  });
}

}  // namespace

void run(CudaStream& stream, const FeatureMapForward& op) {
  if (op.y.size() == 0) {
    return;
  }
  dispatch_device("feature_map", op.y.dtype, [&](auto zero) {
    using T = decltype(zero);
    DeviceScratch scratch(stream);
    FeatureMapArrays<T> a = arrays_of<T>(op.y, op.x, op.weight);
    a.y_out = op.y.as<T>();
    map(stream, scratch, a);
  });
}

void run(CudaStream& stream, const FeatureMapBackward& op) {
  if (op.y.size() == 0) {
    return;
  }
  dispatch_device(
      "feature_map backward", op.y.dtype, [&](auto zero) { backward<decltype(zero)>(stream, op); });
}

}  // namespace bifocal
