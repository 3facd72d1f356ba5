// Marks as CUDA events.
#include <vector>

#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"
#include "ops/timer.h"

namespace bifocal {
namespace {

// Events are kept for the next marks.
class CudaClock : public StreamClock {
 public:
  explicit CudaClock(CudaStream& stream) : stream_(stream.handle()) {}

  ~CudaClock() override {
    for (cudaEvent_t event : events_) {
      cudaEventDestroy(event);
    }
  }

  void mark() override {
    if (marks_ == events_.size()) {
      cudaEvent_t event = nullptr;
      events_.reserve(marks_ + 1);
      BIFOCAL_CUDA(cudaEventCreate(&event));
      events_.push_back(event);
    }
    BIFOCAL_CUDA(cudaEventRecord(events_[marks_], stream_));
    ++marks_;
  }

  std::vector<double> take() override {
    std::vector<double> seconds;
    if (marks_ > 0) {
      BIFOCAL_CUDA(cudaEventSynchronize(events_[marks_ - 1]));
    }
    for (std::size_t i = 1; i < marks_; ++i) {
      float milliseconds = 0.0F;
      BIFOCAL_CUDA(cudaEventElapsedTime(&milliseconds, events_[i - 1], events_[i]));
      seconds.push_back(static_cast<double>(milliseconds) * 1e-3);
    }
    marks_ = 0;
    return seconds;
  }

 private:
  cudaStream_t stream_;
  std::vector<cudaEvent_t> events_;
  std::size_t marks_ = 0;  // of events_, recorded and not taken
};

}  // namespace

std::unique_ptr<StreamClock> make_clock(CudaStream& stream) {
  return std::make_unique<CudaClock>(stream);
}

}  // namespace bifocal
