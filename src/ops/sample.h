// The next token from logits: greedy or sampled with temperature, top-k and top-p.
#pragma once

#include <cstdint>

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

// temperature 0 takes the largest logit (lowest index on a tie). Otherwise: divide by the
// temperature, keep the top_k largest (0: all), then the smallest set whose probability reaches
// top_p (of what top_k kept), draw by inverse distribution over the kept ids in increasing order
// with random_uniform(seed, streams[row], index). Ties keep the lowest index.
struct Sample {
  TensorView ids;          // [rows] i32
  ConstTensorView logits;  // [rows, vocabulary]
  double temperature = 0.0;
  std::int64_t top_k = 0;
  double top_p = 1.0;
  std::uint64_t seed = 0;
  ConstTensorView
      streams;  // [rows] i64: one random stream per sequence; needed where temperature > 0
  std::uint64_t index = 0;  // position of the drawn token in its answer
  void check() const;
};

void run(CpuStream&, const Sample&);

}  // namespace bifocal
