// Where work is queued. CpuStream runs each op at once, on OpenMP threads.
#pragma once

#include <variant>

namespace bifocal {

struct CpuStream {};

// kernels/cuda_stream.h; defined in builds with CUDA.
class CudaStream;

// Whether this build has the CUDA backend. This file alone names the switch.
#ifdef BIFOCAL_WITH_CUDA
inline constexpr bool kWithCuda = true;
using AnyStream = std::variant<CpuStream*, CudaStream*>;
#else
inline constexpr bool kWithCuda = false;
using AnyStream = std::variant<CpuStream*>;
#endif

// The one place where an op chooses its backend (see ops/run.h).
struct Stream {
  AnyStream device;
};

}  // namespace bifocal
