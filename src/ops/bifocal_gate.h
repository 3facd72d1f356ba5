// Mixes far and near sight: y_h = o_h far_h + (1 - o_h) near_h with o = sigmoid(gate).
#pragma once

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

struct BifocalGateForward {
  TensorView y;               // [tokens, heads, head_dim]
  ConstTensorView far, near;  // [tokens, heads, head_dim]
  ConstTensorView gate;       // [tokens, heads] pre-activations
  void check() const;
};

struct BifocalGateBackward {
  TensorView d_far, d_near;  // [tokens, heads, head_dim]; overwritten; either may be d_y itself
  TensorView d_gate;         // [tokens, heads]; overwritten
  ConstTensorView d_y, far, near;
  ConstTensorView gate;
  void check() const;
};

void run(CpuStream&, const BifocalGateForward&);
void run(CpuStream&, const BifocalGateBackward&);
void run(CudaStream&, const BifocalGateForward&);
void run(CudaStream&, const BifocalGateBackward&);

}  // namespace bifocal
