// Tensors made of nothing: one value everywhere, or random numbers.
#pragma once

#include <cstdint>

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

// Every element of x (f32, f64 or bf16) becomes value, rounded to nearest even.
struct Fill {
  TensorView x;
  double value = 0.0;
  void check() const;
};

// x[i] = deviation * random_normal(seed, stream, begin + i) (core/random.h), formed in double and
// rounded to float32 before bfloat16. However a tensor is cut, a part with its `begin` gets the
// numbers of the whole. CPU and GPU agree to the rounding of x, but for elementary functions' last
// bits in double.
struct FillNormal {
  TensorView x;  // f32, f64 or bf16
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
  std::uint64_t begin = 0;
  double deviation = 1.0;
  void check() const;
};

void run(CpuStream&, const Fill&);
void run(CpuStream&, const FillNormal&);
void run(CudaStream&, const Fill&);
void run(CudaStream&, const FillNormal&);

}  // namespace bifocal
