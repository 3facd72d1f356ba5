// Operations of a training step's matrix products, counted from sizes alone (a multiply and an add
// are two). What elementwise work adds is not counted.
#pragma once

#include <cstdint>
#include <span>

#include "config/model_config.h"

namespace bifocal {

// Tokens of the mLSTM's chunks that the counts assume.
inline constexpr std::int64_t kCountedChunk = 128;

// One layer's forward pass over packed documents of these lengths.
struct LayerFlop {
  double projections = 0.0;  // q, k, v, gates
  double attention = 0.0;
  double features = 0.0;
  double mlstm = 0.0;
  double rest = 0.0;  // output projection and MLP

  double mixer() const { return projections + attention + features + mlstm; }

  double total() const { return mixer() + rest; }
};

LayerFlop layer_flop(const ModelConfig& model,
                     const MixerSettings& mixer,
                     std::span<const std::int64_t> documents);

// The same layer's backward pass: twice the products with weights, attention with five products for
// two, the mLSTM by its own count.
LayerFlop layer_backward_flop(const ModelConfig& model,
                              const MixerSettings& mixer,
                              std::span<const std::int64_t> documents);

// Stage 2 or pretraining (no teacher) on one row.
struct StepFlop {
  double teacher_forward = 0.0;
  double student_forward = 0.0;
  double head = 0.0;  // logits of both models, and the gradients
  double student_backward = 0.0;
  double recomputed = 0.0;  // where blocks are computed again; no part of total()

  double total() const { return teacher_forward + student_forward + head + student_backward; }
};

// teacher: nullptr for none.
StepFlop step_flop(const ModelConfig& student,
                   const ModelConfig* teacher,
                   std::span<const std::int64_t> documents);

// Stage 1 on one row: the teacher's forward pass and the mixers' training. trains_projections: also
// q, k and v learn, and gradients go through attention.
StepFlop align_flop(const ModelConfig& student,
                    const ModelConfig& teacher,
                    std::span<const std::int64_t> documents,
                    bool trains_projections);

}  // namespace bifocal
