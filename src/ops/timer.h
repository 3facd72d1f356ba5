// Time that queued work takes on its device.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/stream.h"

namespace bifocal {

// Marks in a stream's order of work. Marking queues; it waits for nothing.
class StreamClock {
 public:
  StreamClock() = default;
  StreamClock(const StreamClock&) = delete;
  StreamClock& operator=(const StreamClock&) = delete;
  virtual ~StreamClock() = default;

  virtual void mark() = 0;

  // Seconds between each mark and the one before it, one fewer than marks. Waits for the last mark
  // and forgets all.
  virtual std::vector<double> take() = 0;
};

std::unique_ptr<StreamClock> make_clock(CpuStream& stream);
std::unique_ptr<StreamClock> make_clock(CudaStream& stream);

inline std::unique_ptr<StreamClock> make_clock(Stream& stream) {
  return std::visit([](auto* backend) { return make_clock(*backend); }, stream.device);
}

// Which part of a program its device time goes to. What is queued from phase(name) on, until the
// next phase or take(), belongs to `name`.
class Timeline {
 public:
  explicit Timeline(Stream& stream) : clock_(make_clock(stream)) {}

  // Drops what was not taken.
  void clear();
  void phase(const std::string& name);

  // Seconds by name, of all phases since the last take() or clear(). Waits for the stream.
  std::map<std::string, double> take();

 private:
  std::unique_ptr<StreamClock> clock_;
  std::vector<std::string> names_;
};

}  // namespace bifocal
