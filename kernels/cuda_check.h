// The check of CUDA calls.
#pragma once

#include <source_location>

#include <cuda_runtime.h>

#include "core/error.h"

namespace bifocal {

// Throws unless status is success. An error that stays pending is cleared first, so that the next
// check does not report it again.
inline void check_cuda(cudaError_t status, const char* call, std::source_location place) {
  if (status == cudaSuccess) {
    return;
  }
  cudaGetLastError();
  fail_call("CUDA", call, cudaGetErrorString(status), place);
}

}  // namespace bifocal

#define BIFOCAL_CUDA(call) ::bifocal::check_cuda((call), #call, std::source_location::current())
