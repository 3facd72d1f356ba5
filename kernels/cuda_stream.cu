// Creation, waiting and end of a CUDA stream.
#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"

namespace bifocal {

CudaStream::CudaStream(int device) {
  BIFOCAL_CUDA(cudaSetDevice(device));
  BIFOCAL_CUDA(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking));
}

CudaStream::~CudaStream() {
  cudaStreamDestroy(handle_);
}

void CudaStream::synchronize() {
  BIFOCAL_CUDA(cudaStreamSynchronize(handle_));
}

}  // namespace bifocal
