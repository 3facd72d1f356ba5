// Device memory that lives as long as one op's queued work.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda_stream.h"

namespace bifocal {

// Memory taken and given back in the order of the stream: the destructor may run while kernels that
// use it are still queued. Contents are undefined.
class DeviceScratch {
 public:
  explicit DeviceScratch(CudaStream& stream) : memory_(stream.memory()) {}

  // Room for `count` elements, aligned to 512 bytes. Throws Error when memory runs out.
  template <class T>
  T* take(std::int64_t count) {
    const std::int64_t bytes = (count > 0 ? count : 1) * static_cast<std::int64_t>(sizeof(T));
    blocks_.push_back(memory_.empty(Region::scratch, DType::u8, {bytes}));
    return reinterpret_cast<T*>(blocks_.back().template as<std::uint8_t>());
  }

 private:
  Memory& memory_;
  std::vector<Tensor> blocks_;
};

}  // namespace bifocal
