// One GPU as a backend.
#include <algorithm>

#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"
#include "kernels/device_communicator.h"
#include "kernels/kernel_choice.h"
#include "parallel/backend.h"

namespace bifocal {
namespace {

// Pinned blocks, which kernels address as they are. For a few long-lived tensors: every block is
// taken from the system and returned to it.
class PinnedSource final : public MemorySource {
 public:
  explicit PinnedSource(CudaStream& stream) : stream_(stream) {}

  bool on_host() const override { return true; }

  std::size_t granule() const override { return kGranule; }

  void* take(std::size_t bytes) override {
    void* block = nullptr;
    if (cudaHostAlloc(&block, bytes, cudaHostAllocPortable | cudaHostAllocMapped) != cudaSuccess) {
      cudaGetLastError();
      return nullptr;
    }
    held_ += bytes;
    peak_held_ = std::max(peak_held_, held_);
    return block;
  }

  void give(void* block, std::size_t bytes) noexcept override {
    cudaStreamSynchronize(stream_.handle());
    cudaFreeHost(block);
    held_ -= bytes;
  }

  void clear(void* block, std::size_t bytes) override {
    BIFOCAL_CUDA(cudaMemsetAsync(block, 0, bytes, stream_.handle()));
  }

  void trim() override {}

  std::size_t held_bytes() const override { return held_; }

  std::size_t peak_held_bytes() const override { return peak_held_; }

  std::string shortage() const override { return "the host has no more that it can pin"; }

 private:
  static constexpr std::size_t kGranule = 4096;

  CudaStream& stream_;
  std::size_t held_ = 0;
  std::size_t peak_held_ = 0;
};

class CudaBackend final : public Backend {
 public:
  CudaBackend(int device, std::size_t limit_bytes)
      : limit_(limit_bytes), cuda_({.device = device, .limit_bytes = limit_bytes}) {}

  Stream& stream() override { return stream_; }

  Memory& memory() override { return cuda_.memory(); }

  std::size_t free_bytes() const override {
    std::size_t free = 0;
    std::size_t total = 0;
    BIFOCAL_CUDA(cudaMemGetInfo(&free, &total));
    const std::size_t held = cuda_.memory().held_bytes();
    return limit_ == 0 ? free : std::min(free, limit_ - std::min(limit_, held));
  }

  Memory& host_memory() override { return host_memory_; }

  std::unique_ptr<Communicator> communicator(std::unique_ptr<Communicator> host) override {
    return make_device_communicator(cuda_, cuda_.memory(), std::move(host));
  }

 private:
  std::size_t limit_;
  mutable CudaStream cuda_;
  Stream stream_{&cuda_};
  Memory host_memory_{std::make_unique<PinnedSource>(cuda_)};
};

}  // namespace

std::unique_ptr<Backend> open_cuda_backend(int local_rank,
                                           std::size_t limit_bytes,
                                           Kernels kernels) {
  set_kernel_choice(kernels == Kernels::portable ? KernelChoice::portable
                                                 : KernelChoice::automatic);
  return std::make_unique<CudaBackend>(choose_device(local_rank), limit_bytes);
}

}  // namespace bifocal
