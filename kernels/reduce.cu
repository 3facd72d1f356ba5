// Sums in double and in a fixed order: parts of a tensor first, then the parts.
#include "kernels/device_scratch.h"
#include "kernels/launch.cuh"
#include "kernels/warp.cuh"
#include "ops/reduce.h"

namespace bifocal {
namespace {

constexpr int kMostParts = 1056;  // eight blocks for each multiprocessor of an H200
constexpr int kSumThreads = 1024;
constexpr int kUnroll = 4;  // loads of a thread in flight

// The block's sum of x, in thread 0.
template <int Threads>
__device__ double block_sum(double x) {
  __shared__ double partial[Threads / kWarp];
  x = warp_sum(x);
  if (threadIdx.x % kWarp == 0) {
    partial[threadIdx.x / kWarp] = x;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < Threads / kWarp; ++warp) {
      x += partial[warp];
    }
  }
  return x;
}

template <class T, int N>
__device__ double squares(const Vector<T, N>& v) {
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const auto x = static_cast<double>(load_float(v.element[i]));
    sum += x * x;
  }
  return sum;
}

// Block b sums groups [b span, b span + span) of N elements; the last block also the rest.
template <class T, int N>
__global__ void __launch_bounds__(kBlockThreads)
    squares_kernel(double* parts, const T* x, std::int64_t size, std::int64_t span) {
  const std::int64_t groups = size / N;
  const std::int64_t end = min(groups, (blockIdx.x + 1) * span);
  std::int64_t group = blockIdx.x * span + threadIdx.x;
  double sum = 0.0;
  for (; group + (kUnroll - 1) * kBlockThreads < end; group += kUnroll * kBlockThreads) {
    Vector<T, N> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      v[u] = load_vector<N>(x, group + u * kBlockThreads);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      sum += squares<T, N>(v[u]);
    }
  }
  for (; group < end; group += kBlockThreads) {
    sum += squares<T, N>(load_vector<N>(x, group));
  }
  const std::int64_t rest = groups * N + threadIdx.x;
  if (blockIdx.x == gridDim.x - 1 && rest < size) {
    sum += squares<T, 1>(load_vector<1>(x, rest));
  }
  sum = block_sum<kBlockThreads>(sum);
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = sum;
  }
}

// sum += the parts; parts of keep 0 do not count. One block.
template <bool Kept>
__global__ void __launch_bounds__(kSumThreads)
    add_kernel(double* sum, const double* parts, const std::uint8_t* keep, std::int64_t count) {
  double of_thread = 0.0;
#pragma unroll 4
  for (std::int64_t i = threadIdx.x; i < count; i += kSumThreads) {
    const double part = parts[i];
    if constexpr (Kept) {
      of_thread += keep[i] != 0 ? part : 0.0;
    } else {
      of_thread += part;
    }
  }
  const double total = block_sum<kSumThreads>(of_thread);
  if (threadIdx.x == 0) {
    *sum += total;
  }
}

template <class T, int N>
int launch_squares(CudaStream& stream, double* parts, const T* x, std::int64_t size) {
  const std::int64_t groups = std::max<std::int64_t>(1, size / N);
  const std::int64_t span = ceil_div(std::max<std::int64_t>(groups, kMostParts), kMostParts);
  const auto blocks = static_cast<int>(ceil_div(groups, span));
  squares_kernel<T, N><<<blocks, kBlockThreads, 0, stream.handle()>>>(parts, x, size, span);
  BIFOCAL_CUDA(cudaGetLastError());
  return blocks;
}

}  // namespace

void run(CudaStream& stream, const SumOfSquares& op) {
  const std::int64_t size = op.x.size();
  if (size == 0) {
    return;
  }
  DeviceScratch scratch(stream);
  auto* parts = scratch.take<double>(kMostParts);
  const int count = dispatch_device("reduce", op.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* x = op.x.as<T>();
    return is_aligned(16, x) ? launch_squares<T, kVectorSize<T>>(stream, parts, x, size)
                             : launch_squares<T, 1>(stream, parts, x, size);
  });
  add_kernel<false>
      <<<1, kSumThreads, 0, stream.handle()>>>(op.sum.as<double>(), parts, nullptr, count);
  BIFOCAL_CUDA(cudaGetLastError());
}

void run(CudaStream& stream, const KeptSum& op) {
  if (op.x.size() == 0) {
    return;
  }
  add_kernel<true><<<1, kSumThreads, 0, stream.handle()>>>(
      op.sum.as<double>(), op.x.as<double>(), op.keep.as<std::uint8_t>(), op.x.size());
  BIFOCAL_CUDA(cudaGetLastError());
}

}  // namespace bifocal
