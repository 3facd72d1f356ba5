// Work that is queued again and again with the same arguments, as a step of generation is.
#pragma once

#include <functional>
#include <memory>

#include "core/stream.h"

namespace bifocal {

// Ops with the tensors they were recorded with: these must still be there, and what changes from
// one time to the next must lie in them.
class Recording {
 public:
  Recording() = default;
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  virtual ~Recording() = default;

  // Queues the work once more.
  virtual void replay() = 0;
};

// `queue` queues ops on the stream and nothing else: no copy to or from the host, no waiting.
// Nothing is computed before the first replay: a GPU's stream notes the ops down, a CPU calls
// `queue` at each replay. The same ops must have run before with the same types and shapes: what
// kernels and libraries set up at their first use cannot be recorded.
std::unique_ptr<Recording> record(CpuStream& stream, std::function<void()> queue);
std::unique_ptr<Recording> record(CudaStream& stream, std::function<void()> queue);

inline std::unique_ptr<Recording> record(Stream& stream, std::function<void()> queue) {
  return std::visit([&](auto* backend) { return record(*backend, std::move(queue)); },
                    stream.device);
}

}  // namespace bifocal
