// Rotary positions, halves convention: element i is rotated with element i + head_dim / 2.
#pragma once

#include <vector>

#include "core/rope_scaling.h"
#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

// Inverse frequencies [head_dim / 2] (bifocal_reference.py, rope_frequencies).
std::vector<double> rope_frequencies(int head_dim, double theta, const RopeScaling& scaling);

// cos and sin of position x frequency; angles are formed in double.
struct RopeTable {
  TensorView cos, sin;          // [tokens, head_dim / 2]
  ConstTensorView positions;    // [tokens] i32, position inside the document
  ConstTensorView frequencies;  // [head_dim / 2] f64, on the device as the others
  void check() const;
};

// Rotates x in place; inverse rotates back, which is also the backward pass.
struct RopeRotate {
  TensorView x;              // [tokens, heads, head_dim]
  ConstTensorView cos, sin;  // [tokens, head_dim / 2], type of x, but float32 beside bfloat16
  bool inverse = false;
  void check() const;
};

void run(CpuStream&, const RopeTable&);
void run(CpuStream&, const RopeRotate&);
void run(CudaStream&, const RopeTable&);
void run(CudaStream&, const RopeRotate&);

}  // namespace bifocal
