// Device memory that lives as long as one op's queued work.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"

namespace bifocal {

// Memory taken and given back in the order of the stream: the destructor may run while kernels that
// use it are still queued. Contents are undefined.
class DeviceScratch {
 public:
  explicit DeviceScratch(CudaStream& stream) : stream_(stream.handle()) {}

  ~DeviceScratch() {
    for (void* block : blocks_) {
      cudaFreeAsync(block, stream_);
    }
  }

  DeviceScratch(const DeviceScratch&) = delete;
  DeviceScratch& operator=(const DeviceScratch&) = delete;

  // Room for `count` elements, aligned to 256 bytes. Throws Error when memory runs out.
  template <class T>
  T* take(std::int64_t count) {
    void* block = nullptr;
    const auto bytes = static_cast<std::size_t>(count > 0 ? count : 1) * sizeof(T);
    blocks_.reserve(blocks_.size() + 1);
    BIFOCAL_CUDA(cudaMallocAsync(&block, bytes, stream_));
    blocks_.push_back(block);
    return static_cast<T*>(block);
  }

 private:
  cudaStream_t stream_;
  std::vector<void*> blocks_;
};

}  // namespace bifocal
