// AdamW (Loshchilov and Hutter, 2019) over a flat range of one parameter.
#pragma once

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

// g = grad_scale * gradient; first = beta1 first + (1 - beta1) g; second likewise with g^2;
// parameter *= 1 - rate * decay, then -= rate * mhat / (sqrt(vhat) + eps), mhat = first / (1 -
// beta1^step).
// Moments of bfloat16 are read, updated in the parameter's type and rounded to nearest even.
struct AdamW {
  TensorView parameter;      // [size]
  TensorView first, second;  // [size], both of the parameter's type or both bfloat16
  ConstTensorView gradient;  // [size], type of the parameter
  TensorView copy = {};      // [size] bfloat16, optional: the updated parameter, rounded
  double rate = 0.0, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, decay = 0.0;
  double grad_scale = 1.0;
  std::int64_t step = 1;  // counts from 1
  void check() const;
};

void run(CpuStream&, const AdamW&);
void run(CudaStream&, const AdamW&);

}  // namespace bifocal
