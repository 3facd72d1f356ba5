// Letters in pinned memory, each with an event that tells its arrival.
#include <array>
#include <cstring>

#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"
#include "ops/mailbox.h"

namespace bifocal {
namespace {

class CudaMailbox : public Mailbox {
 public:
  CudaMailbox(CudaStream& stream, std::int64_t most_elements)
      : stream_(stream.handle()), most_elements_(most_elements) {
    const auto bytes = static_cast<std::size_t>(most_elements) * kMost * sizeof(std::int32_t);
    BIFOCAL_CUDA(cudaMallocHost(&memory_, bytes));
    for (cudaEvent_t& event : arrived_) {
      BIFOCAL_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }
  }

  ~CudaMailbox() override {
    cudaStreamSynchronize(stream_);  // letters may be under way
    for (cudaEvent_t event : arrived_) {
      if (event != nullptr) {
        cudaEventDestroy(event);
      }
    }
    cudaFreeHost(memory_);
  }

  bool is_behind() const override { return true; }

  void post(const ConstTensorView& x) override {
    BIFOCAL_REQUIRE(x.size() <= most_elements_ && posted_ - taken_ < kMost,
                    "[mailbox] wanted at most {} elements and {} letters, got {} and one more than "
                    "{}: take letters, or make a larger mailbox",
                    most_elements_,
                    kMost,
                    x.size(),
                    posted_ - taken_);
    const std::size_t at = posted_ % kMost;
    sizes_[at] = x.size();
    BIFOCAL_CUDA(cudaMemcpyAsync(
        letter(at), x.as<std::int32_t>(), x.bytes(), cudaMemcpyDeviceToHost, stream_));
    BIFOCAL_CUDA(cudaEventRecord(arrived_[at], stream_));
    ++posted_;
  }

  std::vector<std::int32_t> take() override {
    BIFOCAL_ASSERT(taken_ < posted_);
    const std::size_t at = taken_ % kMost;
    BIFOCAL_CUDA(cudaEventSynchronize(arrived_[at]));
    ++taken_;
    return {letter(at), letter(at) + sizes_[at]};
  }

 private:
  std::int32_t* letter(std::size_t at) const {
    return memory_ + static_cast<std::int64_t>(at) * most_elements_;
  }

  cudaStream_t stream_;
  std::int64_t most_elements_;
  std::int32_t* memory_ = nullptr;
  std::array<cudaEvent_t, kMost> arrived_{};
  std::array<std::int64_t, kMost> sizes_{};
  std::size_t posted_ = 0;
  std::size_t taken_ = 0;
};

}  // namespace

std::unique_ptr<Mailbox> make_mailbox(CudaStream& stream, std::int64_t most_elements) {
  return std::make_unique<CudaMailbox>(stream, most_elements);
}

}  // namespace bifocal
