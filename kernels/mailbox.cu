// Letters in pinned memory, each with an event that tells its arrival.
#include <array>
#include <cstring>
#include <memory>
#include <type_traits>

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
    std::int32_t* memory = nullptr;
    BIFOCAL_CUDA(cudaMallocHost(&memory, bytes));
    memory_.reset(memory);
    for (auto& arrived : arrived_) {
      cudaEvent_t event = nullptr;
      BIFOCAL_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
      arrived.reset(event);
    }
  }

  ~CudaMailbox() override {
    cudaStreamSynchronize(stream_);  // letters may be under way
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
    BIFOCAL_CUDA(cudaEventRecord(arrived_[at].get(), stream_));
    ++posted_;
  }

  std::vector<std::int32_t> take() override {
    BIFOCAL_ASSERT(taken_ < posted_);
    const std::size_t at = taken_ % kMost;
    BIFOCAL_CUDA(cudaEventSynchronize(arrived_[at].get()));
    ++taken_;
    return {letter(at), letter(at) + sizes_[at]};
  }

 private:
  struct FreePinned {
    void operator()(std::int32_t* memory) const noexcept { cudaFreeHost(memory); }
  };

  struct DestroyEvent {
    void operator()(cudaEvent_t event) const noexcept { cudaEventDestroy(event); }
  };

  using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, DestroyEvent>;

  std::int32_t* letter(std::size_t at) const {
    return memory_.get() + static_cast<std::int64_t>(at) * most_elements_;
  }

  cudaStream_t stream_;
  std::int64_t most_elements_;
  std::unique_ptr<std::int32_t, FreePinned> memory_;
  std::array<Event, kMost> arrived_;
  std::array<std::int64_t, kMost> sizes_{};
  std::size_t posted_ = 0;
  std::size_t taken_ = 0;
};

}  // namespace

std::unique_ptr<Mailbox> make_mailbox(CudaStream& stream, std::int64_t most_elements) {
  return std::make_unique<CudaMailbox>(stream, most_elements);
}

}  // namespace bifocal
