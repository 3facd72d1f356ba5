// What every part of a model is given: where to compute, where memory comes from, and who shares
// the row.
#pragma once

#include "core/memory.h"
#include "core/stream.h"
#include "ops/elementwise.h"
#include "parallel/communicator.h"

namespace bifocal {

struct Context {
  Stream& stream;
  Memory& memory;
  DType dtype = DType::f32;  // compute type

  // Of gradients of weights, mLSTM states and gates, log-sum-exps, rope tables and logits.
  DType sum_type() const { return bifocal::sum_type(dtype); }

  // Whether the host may read what the stream's ops write.
  bool is_on_host() const { return std::holds_alternative<CpuStream*>(stream.device); }

  // All bits zero.
  Tensor zeros(Region region, DType type, const Shape& shape) const {
    Tensor tensor = memory.empty(region, type, shape);
    run(stream, Zero{.x = tensor});
    return tensor;
  }
};

}  // namespace bifocal
