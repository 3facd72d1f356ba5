// What every part of a model is given: where to compute, where memory comes from, and whom to tell
// what is being done.
#pragma once

#include "core/memory.h"
#include "core/progress.h"
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

  // Told where this rank stands, for those who watch over it; outside training there is none.
  Progress* progress = nullptr;
};

// A step of a stage of training begins, counted from 1 over all stages.
inline void begin_step(const Context& context, std::string_view stage, std::int64_t step) {
  if (context.progress != nullptr) {
    context.progress->step(stage, step);
  }
}

// What is done and queued from here on belongs to `name`, a text that lives as long as the program.
inline void phase(const Context& context, const char* name) {
  if (context.timeline != nullptr) {
    context.timeline->phase(name);
  }
  if (context.progress != nullptr) {
    context.progress->phase(name);
  }
}

}  // namespace bifocal
