// Elements of one type as another.
#pragma once

#include <cstddef>

#include "core/tensor.h"

namespace bifocal {

// Fills `destination` from `source`, which holds as many elements of `type` at any alignment:
// between f64, f32, bf16 and f16 by rounding to nearest even, integers only to the same type.
// Throws Error naming `what` for other pairs.
void convert_elements(const char* what,
                      const std::byte* source,
                      DType type,
                      const TensorView& destination);

}  // namespace bifocal
