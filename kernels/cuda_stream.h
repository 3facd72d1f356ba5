// The CUDA backend's queue of work.
#pragma once

#include <memory>

#include <cuda_runtime.h>

namespace bifocal {

class CublasLt;  // kernels/cublas_lt.h

// Owns one CUDA stream of one device. Ops return once they are queued; they run in order.
class CudaStream {
 public:
  // Makes `device` current for the calling thread. Throws Error when it cannot be used.
  explicit CudaStream(int device = 0);
  ~CudaStream();
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  cudaStream_t handle() const { return handle_; }

  // The library of matrix products for this stream, made at its first use.
  CublasLt& blas();

  // Blocks until all queued work is done. Throws Error when any of it failed.
  void synchronize();

 private:
  cudaStream_t handle_ = nullptr;
  std::unique_ptr<CublasLt> blas_;
};

}  // namespace bifocal
