// Programmatic dependent launch (compute capability 9.0): a kernel's blocks start while the kernel
// before it ends, and wait where they first touch what that one reads or writes. On older devices
// launches follow each other as usual.
#pragma once

#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"
#include "kernels/launch.cuh"

namespace bifocal {

// Everything before it may read only what no kernel of the last launches writes, weights for
// instance.
__device__ inline void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks start once all of this kernel's have come here. They still wait for
// its end.
__device__ inline void let_kernel_after_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// The device's multiprocessors and the tens of its compute capability.
struct DeviceTraits {
  int multiprocessors = 0;
  int major = 0;
};

inline DeviceTraits device_traits(const CudaStream& stream) {
  DeviceTraits traits;
  traits.multiprocessors = num_multiprocessors();
  BIFOCAL_CUDA(
      cudaDeviceGetAttribute(&traits.major, cudaDevAttrComputeCapabilityMajor, stream.device()));
  return traits;
}

// Launches a kernel in whose every block some thread calls wait_for_kernel_before(), and every
// thread that touches what kernels before it read or write.
template <class... Parameters, class... Arguments>
void launch_dependent(CudaStream& stream,
                      dim3 grid,
                      int threads,
                      int shared_bytes,
                      void (*kernel)(Parameters...),
                      const Arguments&... arguments) {
  constexpr int kFreeBytes = 48 * 1024;  // what a block gets without asking
  if (shared_bytes > kFreeBytes) {
    allow_shared(kernel, shared_bytes);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream.handle();
  // Kernels share a multiprocessor only if they cut its memory alike.
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  attributes[0].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = device_traits(stream).major == 9 ? 2 : 1;
  BIFOCAL_CUDA(cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace bifocal
