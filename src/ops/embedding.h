// Token embedding and its scatter-add.
#pragma once

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

// An id outside the table is an Error; on GPUs, which are not waited for, its row becomes NaN, and
// its gradient is left out.
struct EmbeddingForward {
  TensorView y;           // [tokens, width]
  ConstTensorView ids;    // [tokens] i32
  ConstTensorView table;  // [vocabulary, width]
  void check() const;
};

// d_table += d_y scattered by id, tokens in order (the same bits for any number of threads).
struct EmbeddingBackward {
  TensorView d_table;   // [vocabulary, width], type of d_y, but float32 beside bfloat16
  ConstTensorView d_y;  // [tokens, width]
  ConstTensorView ids;  // [tokens] i32
  void check() const;
};

void run(CpuStream&, const EmbeddingForward&);
void run(CpuStream&, const EmbeddingBackward&);
void run(CudaStream&, const EmbeddingForward&);
void run(CudaStream&, const EmbeddingBackward&);

}  // namespace bifocal
