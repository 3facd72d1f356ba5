// What every part of a model is given: where to compute, where memory comes from, and who shares
// the row.
#pragma once

#include "core/memory.h"
#include "core/stream.h"
#include "ops/timer.h"
#include "parallel/communicator.h"

namespace bifocal {

struct Context {
  Stream& stream;
  Memory& memory;
  DType dtype = DType::f32;  // compute type

  // Of gradients of weights, mLSTM states and gates, log-sum-exps, rope tables and logits.
  DType sum_type() const { return bifocal::sum_type(dtype); }

  // Told which part of a step queued what; most runs have none.
  Timeline* timeline = nullptr;
};

// What was queued since the lap before belongs to `name`.
inline void lap(const Context& context, const char* name) {
  if (context.timeline != nullptr) {
    context.timeline->lap(name);
  }
}

}  // namespace bifocal
