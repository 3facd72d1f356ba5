// Matrix products. CPU: rows are dealt to OpenMP threads, each calls BLAS on its part. "As sums":
// of the other tensors' type, but float32 beside bfloat16 ones.
#pragma once

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

// y = x weight^T (+ bias).
struct LinearForward {
  TensorView y;            // [rows, out], type of x or as sums
  ConstTensorView x;       // [rows, in]
  ConstTensorView weight;  // [out, in], type of x
  ConstTensorView bias;    // [out], type of x, optional
  void check() const;
};

// d_x = d_y weight, added to d_x when accumulate.
struct LinearBackwardInput {
  TensorView d_x;          // [rows, in]
  ConstTensorView d_y;     // [rows, out]
  ConstTensorView weight;  // [out, in]
  bool accumulate = false;
  void check() const;
};

// d_weight += d_y^T x, d_bias += column sums of d_y (double sums, rows in order).
struct LinearBackwardWeight {
  TensorView d_weight;  // [out, in], as sums
  TensorView d_bias;    // [out], as sums, optional
  ConstTensorView d_y;  // [rows, out]
  ConstTensorView x;    // [rows, in]
  void check() const;
};

void run(CpuStream&, const LinearForward&);
void run(CpuStream&, const LinearBackwardInput&);
void run(CpuStream&, const LinearBackwardWeight&);
void run(CudaStream&, const LinearForward&);
void run(CudaStream&, const LinearBackwardInput&);
void run(CudaStream&, const LinearBackwardWeight&);

}  // namespace bifocal
