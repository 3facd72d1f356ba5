// Creation, waiting and end of a CUDA stream.
#include "kernels/cublas_lt.h"
#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"
#include "kernels/device_memory.h"
#include "kernels/pinned_ring.h"
#include "ops/transfer.h"

namespace bifocal {
namespace {

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  BIFOCAL_CUDA(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

}  // namespace

CudaStream::CudaStream(int device) : CudaStream(Options{.device = device}) {}

CudaStream::CudaStream(const Options& options) : device_(options.device) {
  const int device = options.device;
  BIFOCAL_CUDA(cudaSetDevice(device));
  const int major = attribute(cudaDevAttrComputeCapabilityMajor, device);
  const int minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
  BIFOCAL_REQUIRE(major == 8 || (major == 9 && minor == 0),
                  "[cuda] wanted a GPU of compute capability 8.x or 9.0, device {} has {}.{}: the "
                  "kernels are not built for it, use another one",
                  device,
                  major,
                  minor);
  cudaStream_t handle = nullptr;
  BIFOCAL_CUDA(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking));
  handle_.reset(handle);
  memory_ = std::make_unique<Memory>(make_device_source(handle, device, options.limit_bytes));
}

CudaStream::~CudaStream() {
  cudaStreamSynchronize(handle());  // kernels may still use what goes now
}

PinnedRing& CudaStream::ring() {
  if (!ring_) {
    ring_ = std::make_unique<PinnedRing>(handle());
  }
  return *ring_;
}

CublasLt& CudaStream::blas() {
  if (blas_ == nullptr) {
    blas_ = std::make_unique<CublasLt>();
  }
  return *blas_;
}

void CudaStream::synchronize() {
  BIFOCAL_CUDA(cudaStreamSynchronize(handle()));
}

void synchronize(CudaStream& stream) {
  stream.synchronize();
}

}  // namespace bifocal
