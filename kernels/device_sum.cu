// One thread an element, ranks in order: the bits are those of the sums on the host.
#include <algorithm>
#include <type_traits>

#include "kernels/device_sum.h"
#include "kernels/launch.cuh"

namespace bifocal {

namespace {

template <class Wide, class T>
__device__ Wide widen(T x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return load_float(x);
  } else {
    return static_cast<Wide>(x);
  }
}

template <class T, class Wide>
__device__ T narrow(Wide x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return store_as<BFloat16>(x);
  } else {
    return static_cast<T>(x);
  }
}

// Wide is the type that sums are formed in.
template <class Wide, bool kAdd, class To, class From>
__global__ void __launch_bounds__(kBlockThreads)
    sum_kernel(To* target, const From* slices, std::int64_t n, int ranks) {
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * kBlockThreads;
  std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  for (; i < n; i += threads) {
    Wide sum = widen<Wide>(slices[i]);
    for (int rank = 1; rank < ranks; ++rank) {
      sum += widen<Wide>(slices[rank * n + i]);
    }
    if constexpr (kAdd) {
      sum += widen<Wide>(target[i]);
    }
    target[i] = narrow<To>(sum);
  }
}

template <class Wide, bool kAdd, class From, class To>
void launch(cudaStream_t stream, To* target, const void* slices, std::int64_t n, int ranks) {
  if (n == 0) {
    return;
  }
  constexpr std::int64_t kMostBlocks = 4096;  // several a processor; each goes on to later elements
  const std::int64_t blocks = std::min(kMostBlocks, ceil_div(n, kBlockThreads));
  sum_kernel<Wide, kAdd><<<grid_of(blocks), kBlockThreads, 0, stream>>>(
      target, static_cast<const From*>(slices), n, ranks);
  BIFOCAL_CUDA(cudaGetLastError());
}

}  // namespace

void add_slices(
    cudaStream_t stream, const TensorView& part, const void* slices, DType dtype, int ranks) {
  const std::int64_t n = part.size();
  if (part.dtype == DType::f64) {
    auto* target = part.as<double>();
    if (dtype == DType::f64) {
      return launch<double, true, double>(stream, target, slices, n, ranks);
    }
    if (dtype == DType::f32) {
      return launch<double, true, float>(stream, target, slices, n, ranks);
    }
    BIFOCAL_ASSERT(dtype == DType::bf16);
    return launch<double, true, BFloat16>(stream, target, slices, n, ranks);
  }
  if (part.dtype == DType::f32) {
    auto* target = part.as<float>();
    if (dtype == DType::f32) {
      return launch<float, true, float>(stream, target, slices, n, ranks);
    }
    BIFOCAL_ASSERT(dtype == DType::bf16);
    return launch<float, true, BFloat16>(stream, target, slices, n, ranks);
  }
  BIFOCAL_ASSERT(dtype == DType::bf16);
  launch<float, true, BFloat16>(stream, part.as<BFloat16>(), slices, n, ranks);
}

void sum_slices(cudaStream_t stream, const TensorView& data, const void* slices, int ranks) {
  const std::int64_t n = data.size();
  switch (data.dtype) {
    case DType::f64:
      return launch<double, false, double>(stream, data.as<double>(), slices, n, ranks);
    case DType::f32:
      return launch<float, false, float>(stream, data.as<float>(), slices, n, ranks);
    case DType::i64:
      return launch<std::int64_t, false, std::int64_t>(
          stream, data.as<std::int64_t>(), slices, n, ranks);
    default:
      return launch<float, false, BFloat16>(stream, data.as<BFloat16>(), slices, n, ranks);
  }
}

}  // namespace bifocal
