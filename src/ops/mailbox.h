// Small tensors from the device to the host, which takes each when it likes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/stream.h"
#include "core/tensor.h"

namespace bifocal {

class Mailbox {
 public:
  Mailbox() = default;
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;
  virtual ~Mailbox() = default;

  // Whether post() returns before the elements are there, so that there is a gain in queuing more
  // work before take().
  virtual bool is_behind() const = 0;

  // Queues a copy of an i32 tensor. Throws Error where it is larger than the mailbox's letters, or
  // `kMost` letters have not been taken.
  virtual void post(const ConstTensorView& x) = 0;

  // The elements of the letter posted first. Waits until they are there. There must be one.
  virtual std::vector<std::int32_t> take() = 0;

  static constexpr std::size_t kMost = 4;
};

// most_elements: of a letter.
std::unique_ptr<Mailbox> make_mailbox(CpuStream& stream, std::int64_t most_elements);
std::unique_ptr<Mailbox> make_mailbox(CudaStream& stream, std::int64_t most_elements);

inline std::unique_ptr<Mailbox> make_mailbox(Stream& stream, std::int64_t most_elements) {
  return std::visit([=](auto* backend) { return make_mailbox(*backend, most_elements); },
                    stream.device);
}

}  // namespace bifocal
