// The CPU as a backend, and the choice that a build leaves.
#include "parallel/backend.h"

#include <algorithm>

namespace bifocal {

namespace {

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(std::size_t limit_bytes) : limit_(limit_bytes), memory_(limit_bytes) {}

  Stream& stream() override { return stream_; }

  Memory& memory() override { return memory_; }

  std::size_t free_bytes() const override {
    return limit_ - std::min(limit_, memory_.held_bytes());
  }

  Memory& host_memory() override { return memory_; }

  std::unique_ptr<Communicator> communicator(std::unique_ptr<Communicator> host) override {
    return host;
  }

 private:
  std::size_t limit_;
  CpuStream cpu_;
  Stream stream_{&cpu_};
  Memory memory_;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(std::size_t limit_bytes) {
  return std::make_unique<CpuBackend>(limit_bytes);
}

std::unique_ptr<Backend> make_cuda_backend([[maybe_unused]] int local_rank,
                                           [[maybe_unused]] std::size_t limit_bytes,
                                           [[maybe_unused]] Kernels kernels) {
  if constexpr (kWithCuda) {
    return open_cuda_backend(local_rank, limit_bytes, kernels);
  } else {
    fail(
        "[cuda] this program was built without CUDA: set run.device = \"cpu\", or build with the "
        "preset cuda");
  }
}

}  // namespace bifocal
