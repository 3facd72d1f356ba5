// The next token from logits: greedy or sampled with temperature, top-k and top-p.
#pragma once

#include <cstdint>

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

// temperature 0 takes the largest logit (lowest id on a tie). Otherwise as transformers does it:
//   divide by the temperature;
//   keep the top_k largest and whatever equals the smallest of them (0: all);
//   of these, keep id i while the ids before it hold less than top_p of the probability, in order
//   of decreasing logits (of equal ones the higher id first): at least one id;
//   draw by inverse distribution over the kept ids in increasing order with
//   random_uniform(seed, streams[row], indices[row]).
// Probabilities are formed and summed in double.
struct Sample {
  TensorView ids;          // [rows] i32
  ConstTensorView logits;  // [rows, vocabulary]
  double temperature = 0.0;
  std::int64_t top_k = 0;
  double top_p = 1.0;
  std::uint64_t seed = 0;
  // Needed where temperature > 0:
  ConstTensorView streams;  // [rows] i64 (bits of a u64): one random stream per sequence
  ConstTensorView indices;  // [rows] i64: position of the drawn token in its answer
  void check() const;
};

void run(CpuStream&, const Sample&);
void run(CudaStream&, const Sample&);

}  // namespace bifocal
