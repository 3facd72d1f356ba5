// Pairs of ops around RMSNorm in one pass over memory. Each gives the bits that its two ops give
// one after the other.
#pragma once

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

// Add, then RmsNormForward of the sum: y = a + b, z = y / sqrt(mean(y^2) + eps) * weight.
struct AddRmsNorm {
  TensorView y;            // [rows, width]; may be a or b
  TensorView z;            // [rows, width]; may be none of the others
  ConstTensorView a, b;    // [rows, width]
  ConstTensorView weight;  // [width]
  double eps = 1e-6;
  void check() const;
};

// RmsNormForward of each head, then RopeRotate.
struct NormRope {
  TensorView y;              // [tokens, heads, head_dim]; may be x
  ConstTensorView x;         // [tokens, heads, head_dim]
  ConstTensorView weight;    // [head_dim]
  ConstTensorView cos, sin;  // [tokens, head_dim / 2], type of x, but float32 beside bfloat16
  double eps = 1e-6;
  void check() const;
};

void run(CpuStream&, const AddRmsNorm&);
void run(CpuStream&, const NormRope&);
void run(CudaStream&, const AddRmsNorm&);
void run(CudaStream&, const NormRope&);

}  // namespace bifocal
