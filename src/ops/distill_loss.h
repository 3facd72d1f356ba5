// Losses of stage 2 and pretraining on one chunk of logits, their gradient, and stage 1's distance.
#pragma once

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

// Row by row over the whole vocabulary, statistics in double:
//   kl[t]    = temperature^2 KL(teacher || student at the temperature)
//   ce[t]    = -log softmax(student)[next[t]]; 0 where next[t] is -1 (no successor)
//   agree[t] = 1 where both have the same largest logit (lowest index on a tie)
//   d_student = kl_weight[t] d kl[t] / d student + ce_weight[t] d ce[t] / d student
// Weights carry everything: kept or not, (1 - s) / N_KL, s / N_CE. A row whose weights are 0 gets
// exact zeros in d_student. Without teacher, kl and agree are absent and kl_weight is not read.
// A next id outside of the vocabulary, where it counts, is an Error; on GPUs, which are not waited
// for, ce or the row's gradient becomes NaN.
struct DistillLoss {
  TensorView d_student;       // [rows, vocabulary], optional; type of student, may then be student
                              // itself, or bfloat16 beside float32 (GPUs)
  TensorView kl;              // [rows] f64, optional
  TensorView ce;              // [rows] f64, optional
  TensorView agree;           // [rows] u8, optional
  ConstTensorView student;    // [rows, vocabulary]
  ConstTensorView teacher;    // [rows, vocabulary], optional
  ConstTensorView next;       // [rows] i32; read for ce or where ce_weight[t] != 0
  ConstTensorView kl_weight;  // [rows] f64, with d_student and teacher
  ConstTensorView ce_weight;  // [rows] f64, optional (0)
  double temperature = 1.0;
  void check() const;
};

// Stage 1, one layer: error += sum |student - teacher|^2 and energy += sum |teacher|^2 over kept
// tokens (double, fixed order); d_student = 2 (student - teacher) on kept tokens, 0 elsewhere.
struct AlignLoss {
  TensorView d_student;              // [tokens, heads, head_dim], optional
  TensorView sums;                   // [2] f64: error, energy; added to
  ConstTensorView student, teacher;  // [tokens, heads, head_dim]
  ConstTensorView keep;              // [tokens] u8
  void check() const;
};

void run(CpuStream&, const DistillLoss&);
void run(CpuStream&, const AlignLoss&);
void run(CudaStream&, const DistillLoss&);
void run(CudaStream&, const AlignLoss&);

}  // namespace bifocal
