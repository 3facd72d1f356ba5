// Device memory that lives as long as one op's queued work.
#pragma once

#include <cstdint>
#include <iterator>
#include <vector>

#include "kernels/cuda_stream.h"

namespace bifocal {

// Memory taken and given back in the order of the stream: the destructor may run while kernels that
// use it are still queued. Contents are undefined.
class DeviceScratch {
 public:
  explicit DeviceScratch(CudaStream& stream)
      : memory_(stream.memory()), keeper_(stream.scratch_keeper()) {}

  ~DeviceScratch() {
    if (keeper_ != nullptr) {
      keeper_->insert(keeper_->end(),
                      std::make_move_iterator(blocks_.begin()),
                      std::make_move_iterator(blocks_.end()));
    }
  }

  DeviceScratch(const DeviceScratch&) = delete;
  DeviceScratch& operator=(const DeviceScratch&) = delete;

  // Room for `count` elements, aligned to 512 bytes. Throws Error when memory runs out.
  template <class T>
  T* take(std::int64_t count) {
    const std::int64_t bytes = (count > 0 ? count : 1) * static_cast<std::int64_t>(sizeof(T));
    blocks_.push_back(memory_.empty(Region::scratch, DType::u8, {bytes}));
    return reinterpret_cast<T*>(blocks_.back().template as<std::uint8_t>());
  }

 private:
  Memory& memory_;
  std::vector<Tensor>* keeper_;
  std::vector<Tensor> blocks_;
};

}  // namespace bifocal
