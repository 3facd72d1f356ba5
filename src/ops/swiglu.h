// Gated MLP activation: y = silu(gate) * up.
#pragma once

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

struct SwigluForward {
  TensorView y;              // [rows, width]
  ConstTensorView gate, up;  // [rows, width]
  void check() const;
};

struct SwigluBackward {
  TensorView d_gate, d_up;        // [rows, width]; either may be d_y, d_gate gate, d_up up itself
  ConstTensorView d_y, gate, up;  // [rows, width]
  void check() const;
};

void run(CpuStream&, const SwigluForward&);
void run(CpuStream&, const SwigluBackward&);
void run(CudaStream&, const SwigluForward&);
void run(CudaStream&, const SwigluBackward&);

}  // namespace bifocal
