// The CUDA backend's queue of work.
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>
#include <vector>

#include <cuda_runtime.h>

#include "core/memory.h"

namespace bifocal {

class CublasLt;    // kernels/cublas_lt.h
class PinnedRing;  // kernels/pinned_ring.h

// Owns one CUDA stream of one device, and the device's memory as far as this process uses it. Ops
// return once they are queued; they run in order.
class CudaStream {
 public:
  struct Options {
    int device = 0;
    std::size_t limit_bytes = 0;  // most device memory for tensors and scratch; 0: what is there
  };

  // Makes the device current for the calling thread. Throws Error when it cannot be used.
  explicit CudaStream(int device = 0);
  explicit CudaStream(const Options& options);
  ~CudaStream();
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  cudaStream_t handle() const { return handle_.get(); }

  int device() const { return device_; }

  // Blocks given back are used again in the stream's order: other streams need an event.
  Memory& memory() { return *memory_; }

  // While set, ops' scratch goes there instead of back to the memory (ops/recording.h).
  void keep_scratch(std::vector<Tensor>* keeper) { scratch_keeper_ = keeper; }

  std::vector<Tensor>* scratch_keeper() const { return scratch_keeper_; }

  // Host memory on the way to the device and back.
  PinnedRing& ring();

  // The library of matrix products for this stream, made at its first use.
  CublasLt& blas();

  // Blocks until all queued work is done. Throws Error when any of it failed.
  void synchronize();

 private:
  struct Destroy {
    void operator()(cudaStream_t stream) const noexcept { cudaStreamDestroy(stream); }
  };

  int device_;
  std::unique_ptr<std::remove_pointer_t<cudaStream_t>, Destroy> handle_;
  std::unique_ptr<Memory> memory_;
  std::vector<Tensor>* scratch_keeper_ = nullptr;
  std::unique_ptr<PinnedRing> ring_;
  std::unique_ptr<CublasLt> blas_;
};

}  // namespace bifocal
