// Creation, waiting and end of a CUDA stream.
#include <cstdint>
#include <limits>

#include "kernels/cublas_lt.h"
#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"

namespace bifocal {

CudaStream::CudaStream(int device) {
  BIFOCAL_CUDA(cudaSetDevice(device));
  // Ops' scratch stays with the process between waits: taking it again then costs microseconds.
  cudaMemPool_t pool = nullptr;
  auto kept = std::numeric_limits<std::uint64_t>::max();
  BIFOCAL_CUDA(cudaDeviceGetDefaultMemPool(&pool, device));
  BIFOCAL_CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept));
  BIFOCAL_CUDA(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking));
}

CudaStream::~CudaStream() {
  cudaStreamDestroy(handle_);
}

CublasLt& CudaStream::blas() {
  if (blas_ == nullptr) {
    blas_ = std::make_unique<CublasLt>();
  }
  return *blas_;
}

void CudaStream::synchronize() {
  BIFOCAL_CUDA(cudaStreamSynchronize(handle_));
}

}  // namespace bifocal
