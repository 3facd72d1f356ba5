// Scratch memory of one op on the device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"

namespace bifocal {

// Taken and given back in the stream's order: ops queued later may get the same bytes. Elements are
// undefined. Throws Error when the device has no memory left.
template <class T>
class StreamMemory {
 public:
  StreamMemory(CudaStream& stream, std::int64_t size) : stream_(stream.handle()) {
    if (size > 0) {
      void* memory = nullptr;
      const std::size_t bytes = static_cast<std::size_t>(size) * sizeof(T);
      BIFOCAL_CUDA(cudaMallocAsync(&memory, bytes, stream_));
      data_ = static_cast<T*>(memory);
    }
  }

  ~StreamMemory() {
    if (data_ != nullptr) {
      cudaFreeAsync(data_, stream_);
    }
  }

  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;

  T* get() const { return data_; }

 private:
  cudaStream_t stream_;
  T* data_ = nullptr;
};

}  // namespace bifocal
