// On a CPU a recording is a function.
#include "ops/recording.h"

#include <utility>

namespace bifocal {

namespace {

class CpuRecording : public Recording {
 public:
  explicit CpuRecording(std::function<void()> queue) : queue_(std::move(queue)) {}

  void replay() override { queue_(); }

 private:
  std::function<void()> queue_;
};

}  // namespace

std::unique_ptr<Recording> record(CpuStream&, std::function<void()> queue) {
  return std::make_unique<CpuRecording>(std::move(queue));
}

}  // namespace bifocal
