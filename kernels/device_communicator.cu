// Which GPU a rank has and which communicator it gets.
#include "core/process.h"
#include "kernels/cuda_check.h"
#include "kernels/device_communicator.h"
#include "kernels/device_self_communicator.h"

#ifdef BIFOCAL_WITH_NCCL
#include "kernels/nccl_communicator.h"
#endif

namespace bifocal {

namespace {

int visible_devices() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();  // clears it
  }
  BIFOCAL_REQUIRE(status == cudaSuccess && count > 0,
                  "[cuda] wanted a GPU on {}, found none ({}): set run.device = \"cpu\", or start "
                  "where there is one",
                  host_name(),
                  status == cudaSuccess ? "no device" : cudaGetErrorString(status));
  return count;
}

// Host and identity of the GPU in use.
std::string device_name() {
  int device = 0;
  cudaDeviceProp properties{};
  BIFOCAL_CUDA(cudaGetDevice(&device));
  BIFOCAL_CUDA(cudaGetDeviceProperties(&properties, device));
  std::string name = host_name() + ", GPU ";
  for (const char byte : properties.uuid.bytes) {
    name += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  }
  return name;
}

void require_own_devices(Communicator& host) {
  const std::vector<std::string> names = gather_texts(host, device_name());
  for (std::size_t rank = 0; rank < names.size(); ++rank) {
    for (std::size_t other = 0; other < rank; ++other) {
      BIFOCAL_REQUIRE(
          names[rank] != names[other],
          "[cuda] wanted a GPU for each rank, but ranks {} and {} share one ({}): start "
          "at most as many ranks on a host as it has GPUs",
          other,
          rank,
          names[rank]);
    }
  }
}

}  // namespace

int choose_device(int local_rank) {
  const int count = visible_devices();
  if (count == 1) {
    return 0;
  }
  BIFOCAL_REQUIRE(local_rank < count,
                  "[cuda] wanted a GPU for each rank of a host, but rank {} of {} is one too many "
                  "for {} GPUs: start at most {} ranks on it",
                  local_rank,
                  host_name(),
                  count,
                  count);
  return local_rank;
}

std::unique_ptr<Communicator> make_device_communicator(CudaStream& compute,
                                                       [[maybe_unused]] Memory& memory,
                                                       std::unique_ptr<Communicator> host) {
  if (host->size() == 1) {
    return make_device_self_communicator(compute, std::move(host));
  }
  require_own_devices(*host);
#ifdef BIFOCAL_WITH_NCCL
  return make_nccl_communicator(compute, memory, std::move(host));
#else
  fail(
      "[nccl] {} ranks on GPUs need NCCL, which this build lacks: install its headers (nccl.h), "
      "configure and build again, or start one rank",
      host->size());
#endif
}

bool is_on_device(const void* pointer) {
  if (pointer == nullptr) {
    return false;
  }
  cudaPointerAttributes attributes{};
  BIFOCAL_CUDA(cudaPointerGetAttributes(&attributes, pointer));
  return attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
}

}  // namespace bifocal
