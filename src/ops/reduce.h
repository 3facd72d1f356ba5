// Deterministic reductions: fixed blocks, double sums, the same bits for any number of threads.
#pragma once

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

// sum += sum of squares of x. A NaN or an infinity in x makes the sum NaN or infinite, so one look
// at it also tells whether x is finite.
struct SumOfSquares {
  TensorView sum;     // [1] f64
  ConstTensorView x;  // any shape
  void check() const;
};

// sum += x[i] over the i with keep[i] != 0, in a fixed order. What lies under keep = 0 does not
// matter, not even NaN.
struct KeptSum {
  TensorView sum;        // [1] f64
  ConstTensorView x;     // [n] f64
  ConstTensorView keep;  // [n] u8
  void check() const;
};

void run(CpuStream&, const SumOfSquares&);
void run(CpuStream&, const KeptSum&);
void run(CudaStream&, const SumOfSquares&);
void run(CudaStream&, const KeptSum&);

}  // namespace bifocal
