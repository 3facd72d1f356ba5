// Matrix products of a few rows: what generation runs once a token. A row's result does not depend
// on the other rows, not in one bit, so a sequence computes the same in any batch. Time is that of
// reading the weights once. On CUDA they are parts of the ops in ops/decode_layer.h alone.
#pragma once

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

// y = x weight^T + bias. On the CPU each sum has 32 bytes of lanes, whose order is fixed.
struct DecodeLinear {
  TensorView y;            // [rows, out], type of x; float32 too where x is bf16
  ConstTensorView x;       // [rows, in]
  ConstTensorView weight;  // [out, in], type of x; bf16 too where x is float32
  ConstTensorView bias;    // [out], type of x or y, optional
  void check() const;
};

// FeatureMapForward (ops/feature_map.h) of a few rows: y_h = softmax(weight_h x_h').
struct DecodeFeatureMap {
  TensorView y;            // [rows, heads, head_dim]
  ConstTensorView x;       // [rows, x_heads, head_dim], type of y
  ConstTensorView weight;  // [heads, head_dim, head_dim], type of y; bf16 too where y is float32
  void check() const;
};

void run(CpuStream&, const DecodeLinear&);
void run(CpuStream&, const DecodeFeatureMap&);

}  // namespace bifocal
