// What every part of a model is given: where to compute, where memory comes from, and who shares
// the row.
#pragma once

#include "core/memory.h"
#include "core/stream.h"
#include "parallel/communicator.h"

namespace bifocal {

struct Context {
  Stream& stream;
  Memory& memory;
  DType dtype = DType::f32;  // compute type
};

}  // namespace bifocal
