// Where work is queued. CpuStream runs each op at once, on OpenMP threads.
#pragma once

#include <variant>

namespace bifocal {

struct CpuStream {};

// kernels/cuda_stream.h; in builds with CUDA.
class CudaStream;

// The one place where an op chooses its backend (see ops/run.h).
struct Stream {
  std::variant<CpuStream*> device;
};

}  // namespace bifocal
