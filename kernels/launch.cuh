// Launches of kernels and the choice of their element type.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/dtype.h"
#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"
#include "kernels/vector.cuh"

namespace bifocal {

inline constexpr int kBlockThreads = 256;

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

inline dim3 grid_of(std::int64_t blocks) {
  constexpr std::int64_t kMostBlocks = 0x7fffffff;  // of grid.x
  BIFOCAL_REQUIRE(blocks <= kMostBlocks,
                  "[cuda] wanted at most {} blocks, got {}: cut the tensor",
                  kMostBlocks,
                  blocks);
  return dim3(static_cast<unsigned>(blocks));
}

// Calls function(T{}) with T = float or BFloat16; any other type is an error that names `where`.
template <class Function>
decltype(auto) dispatch_device(std::string_view where, DType type, Function&& function) {
  if (type == DType::bf16) {
    return function(BFloat16{});
  }
  BIFOCAL_REQUIRE(type == DType::f32,
                  "[{}] wanted float32 or bfloat16 tensors, got {}: CUDA computes in these two",
                  where,
                  name_of(type));
  return function(float{});
}

// Shared memory that a block of the current device may have.
inline int most_shared_bytes() {
  int device = 0;
  int bytes = 0;
  BIFOCAL_CUDA(cudaGetDevice(&device));
  BIFOCAL_CUDA(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bytes;
}

inline int num_multiprocessors() {
  int device = 0;
  int count = 0;
  BIFOCAL_CUDA(cudaGetDevice(&device));
  BIFOCAL_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// Allows a kernel more shared memory than the 48 KB that every device has.
template <class Kernel>
void allow_shared(Kernel kernel, int bytes) {
  BIFOCAL_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

// Launches a kernel with `shared_bytes` of dynamic shared memory, allowed where that is needed.
template <class... Parameters, class... Arguments>
void launch_kernel(CudaStream& stream,
                   dim3 grid,
                   int threads,
                   int shared_bytes,
                   void (*kernel)(Parameters...),
                   const Arguments&... arguments) {
  constexpr int kFreeBytes = 48 * 1024;  // what a block gets without asking
  if (shared_bytes > kFreeBytes) {
    allow_shared(kernel, shared_bytes);
  }
  kernel<<<grid, threads, static_cast<std::size_t>(shared_bytes), stream.handle()>>>(arguments...);
  BIFOCAL_CUDA(cudaGetLastError());
}

// Throws unless the tensor's type is the wanted one.
template <class View>
void require_type(std::string_view where, std::string_view name, const View& tensor, DType wanted) {
  BIFOCAL_REQUIRE(tensor.dtype == wanted,
                  "[{}] {}: wanted {}, got {}",
                  where,
                  name,
                  name_of(wanted),
                  name_of(tensor.dtype));
}

// One thread for each group of N elements: body.vector<N>(group); one thread for each of the `head`
// elements before the first group and of the tail behind the last: body.vector<1>(element), whose
// number counts from the first group, below 0 in the head.
template <int N, class Body>
__global__ void __launch_bounds__(kBlockThreads)
    flat_kernel(std::int64_t size, std::int64_t head, Body body) {
  const std::int64_t groups = size / N;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  if (index < groups) {
    body.template vector<N>(index);
    return;
  }
  if constexpr (N > 1) {
    const std::int64_t element = groups * N + (index - groups);
    if (element < size) {
      body.template vector<1>(element);
    } else if (element < size + head) {
      body.template vector<1>(element - size - head);
    }
  }
}

// Runs an element by element body over `size` elements from its first group on, N at a time when
// the pointers allow it, and over the `head` elements before.
template <int N, class Body>
void launch_flat(
    CudaStream& stream, std::int64_t size, bool aligned, const Body& body, std::int64_t head = 0) {
  if (size + head == 0) {
    return;
  }
  if (aligned) {
    const std::int64_t threads = size / N + size % N + head;
    flat_kernel<N>
        <<<grid_of(ceil_div(threads, kBlockThreads)), kBlockThreads, 0, stream.handle()>>>(
            size, head, body);
  } else {
    flat_kernel<1><<<grid_of(ceil_div(size, kBlockThreads)), kBlockThreads, 0, stream.handle()>>>(
        size, std::int64_t{0}, body);
  }
  BIFOCAL_CUDA(cudaGetLastError());
}

}  // namespace bifocal
