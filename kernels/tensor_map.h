// Descriptions of tensors for the copy engine of Hopper.
#pragma once

#include <cstdint>
#include <initializer_list>

#include <cuda.h>

#include "core/dtype.h"

namespace bifocal {

struct MapDimension {
  std::int64_t size;    // of the tensor, in elements, > 0
  std::int64_t stride;  // in elements; a multiple of 8; 1 in the first dimension
  int box;              // elements of a box, 1 to 256
};

// Of a bfloat16 tensor on a multiple of 16 bytes, fastest dimension first, 2 to 5 of them. Boxes
// of 64 columns lie in shared memory as hopper.cuh says. Throws Error when the driver refuses it.
CUtensorMap make_tensor_map(const BFloat16* tensor, std::initializer_list<MapDimension> dimensions);

// The current device is of compute capability 9.0.
bool is_hopper();

}  // namespace bifocal
