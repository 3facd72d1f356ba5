// Small element by element ops.
#pragma once

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

// y = a + b; y may be a or b.
struct Add {
  TensorView y;
  ConstTensorView a, b;
  void check() const;
};

// All bits of x become 0, whatever it held.
struct Zero {
  TensorView x;
  void check() const;
};

// y = x in y's type (f64, f32, bf16 and f16 in any pairing; to 16 bits by round to nearest even).
struct Cast {
  TensorView y;
  ConstTensorView x;
  void check() const;
};

void run(CpuStream&, const Add&);
void run(CpuStream&, const Zero&);
void run(CpuStream&, const Cast&);
void run(CudaStream&, const Add&);
void run(CudaStream&, const Zero&);
void run(CudaStream&, const Cast&);

}  // namespace bifocal
