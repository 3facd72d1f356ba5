// Softmax features of queries and keys: y_h = softmax(weight_h x_h') over head_dim features.
// y may have more heads than x (states per query head read repeated keys): h' = h / (heads /
// x_heads).
#pragma once

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

struct FeatureMapForward {
  TensorView y;            // [tokens, heads, head_dim]
  ConstTensorView x;       // [tokens, x_heads, head_dim]
  ConstTensorView weight;  // [heads, head_dim, head_dim]: [head, feature, input]
  void check() const;
};

// d_x += , d_weight += . d_weight may be float32 beside bfloat16 tensors (GPUs).
struct FeatureMapBackward {
  TensorView d_x;          // [tokens, x_heads, head_dim]
  TensorView d_weight;     // [heads, head_dim, head_dim]
  ConstTensorView d_y, y;  // [tokens, heads, head_dim]
  ConstTensorView x;       // [tokens, x_heads, head_dim]
  ConstTensorView weight;  // [heads, head_dim, head_dim]
  void check() const;
};

void run(CpuStream&, const FeatureMapForward&);
void run(CpuStream&, const FeatureMapBackward&);
void run(CudaStream&, const FeatureMapForward&);
void run(CudaStream&, const FeatureMapBackward&);

}  // namespace bifocal
