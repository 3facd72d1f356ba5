// Values of tensors wherever a backend keeps them.
#pragma once

#include <vector>

#include "model/context.h"
#include "ops/elementwise.h"
#include "ops/transfer.h"
#include "support/compare.h"

namespace bifocal::test {

// A tensor of the context's device with the values of one on the host, rounded to `dtype`.
inline Tensor to_device(Context& context,
                        const ConstTensorView& host,
                        DType dtype,
                        Region region = Region::activations) {
  CpuStream cpu;
  Memory memory;
  const Tensor rounded = memory.empty(region, dtype, host.shape);
  run(cpu, Cast{.y = rounded, .x = host});
  Tensor tensor = context.memory.empty(region, dtype, host.shape);
  run(context.stream, Upload{.y = tensor, .x = rounded});
  return tensor;
}

// Elements of a float32, float64 or bfloat16 tensor of the context's device.
inline std::vector<double> values_of(Context& context, const ConstTensorView& tensor) {
  CpuStream cpu;
  Memory memory;
  const Tensor host = memory.empty(Region::activations, tensor.dtype, tensor.shape);
  const Tensor wide = memory.empty(Region::activations, DType::f64, tensor.shape);
  run(context.stream, Download{.y = host, .x = tensor});
  run(cpu, Cast{.y = wide, .x = host});
  return to_doubles(wide);
}

}  // namespace bifocal::test
