// RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, row by row. Per-head norms pass rows = tokens x
// heads.
#pragma once

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

struct RmsNormForward {
  TensorView y;            // [rows, width]; may be x itself
  ConstTensorView x;       // [rows, width]
  ConstTensorView weight;  // [width]
  double eps = 1e-6;
  void check() const;
};

// d_x (=, or += when accumulate) and d_weight += . Recomputes 1/rms from x.
struct RmsNormBackward {
  TensorView d_x;       // [rows, width]; may be d_y itself unless accumulate
  TensorView d_weight;  // [width], optional; summed in a fixed order; float32 beside bfloat16
  ConstTensorView d_y;  // [rows, width]
  ConstTensorView x;    // [rows, width]
  ConstTensorView weight;
  double eps = 1e-6;
  bool accumulate = false;
  void check() const;
};

void run(CpuStream&, const RmsNormForward&);
void run(CpuStream&, const RmsNormBackward&);
void run(CudaStream&, const RmsNormForward&);
void run(CudaStream&, const RmsNormBackward&);

}  // namespace bifocal
