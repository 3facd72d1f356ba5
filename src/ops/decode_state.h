// Where sequences stand that grow token by token: kept on the device, so that a step can be queued,
// or recorded and queued again, without the host knowing what the step before drew.
#pragma once

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

// By sequence. [sequences] each.
struct SequenceState {
  TensorView token;     // i32: drawn or given, fed next
  TensorView position;  // i32: tokens fed so far
  TensorView stream;    // i64: random stream (Sample::streams)
  TensorView drawn;     // i64: tokens of the answer so far (Sample::indices)
};

// One step of some sequences: what it feeds and where, gathered row by row. position and drawn of
// these sequences count up.
struct StepBegin {
  TensorView ids, positions;    // [rows] i32
  TensorView streams, indices;  // [rows] i64
  SequenceState state;
  ConstTensorView sequences;  // [rows] i32, distinct
  void check() const;
};

// token[sequences[r]] = ids[r].
struct StepEnd {
  TensorView token;
  ConstTensorView ids;        // [rows] i32
  ConstTensorView sequences;  // [rows] i32, distinct
  void check() const;
};

// Slots of a cache that holds the first `pinned` tokens for good and the last `window` others in a
// ring behind them; window 0: every token, in order. The token at a position is written to its
// place and sees the first `length` slots, its own included.
struct CachePlaces {
  TensorView places, lengths;  // [rows] i32
  ConstTensorView positions;   // [rows] i32
  std::int64_t window = 0;
  std::int64_t pinned = 0;
  void check() const;
};

// The place of one token (host).
inline std::int64_t cache_place(std::int64_t token, std::int64_t window, std::int64_t pinned) {
  return window == 0 || token < pinned ? token : pinned + (token - pinned) % window;
}

void run(CpuStream&, const StepBegin&);
void run(CpuStream&, const StepEnd&);
void run(CpuStream&, const CachePlaces&);
void run(CudaStream&, const StepBegin&);
void run(CudaStream&, const StepEnd&);
void run(CudaStream&, const CachePlaces&);

}  // namespace bifocal
