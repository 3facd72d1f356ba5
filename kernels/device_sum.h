// Sums over ranks on the device, as parallel/collective.h has them for the host.
#pragma once

#include <cuda_runtime.h>

#include "core/tensor.h"

namespace bifocal {

// part [n] += slices[0] + slices[1] + ..., where slice r [n] of type `dtype` is rank r's. Types are
// those of check_reduce_scatter. Summed in rank order: in double if either type is f64, else in
// float32, rounded once to part's type.
void add_slices(
    cudaStream_t stream, const TensorView& part, const void* slices, DType dtype, int ranks);

// The same with = in place of +=; slices are of data's type, one of check_all_reduce.
void sum_slices(cudaStream_t stream, const TensorView& data, const void* slices, int ranks);

}  // namespace bifocal
