// One GPU as a backend.
#include "kernels/cuda_stream.h"
#include "kernels/device_communicator.h"
#include "kernels/kernel_choice.h"
#include "parallel/backend.h"

namespace bifocal {
namespace {

class CudaBackend final : public Backend {
 public:
  CudaBackend(int device, std::size_t limit_bytes)
      : cuda_({.device = device, .limit_bytes = limit_bytes}) {}

  Stream& stream() override { return stream_; }

  Memory& memory() override { return cuda_.memory(); }

  std::unique_ptr<Communicator> communicator(std::unique_ptr<Communicator> host) override {
    return make_device_communicator(cuda_, cuda_.memory(), std::move(host));
  }

 private:
  CudaStream cuda_;
  Stream stream_{&cuda_};
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
