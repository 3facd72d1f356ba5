// A few steps of training of tiny models under any layout of ranks, and what must not depend on it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "distill/logit_loss.h"
#include "distill/stage.h"
#include "parallel/backend.h"
#include "support/tiny_model.h"

namespace bifocal::test {

enum class StageKind : std::uint8_t { align_new, align_mixer, distill, pretrain };

struct Scenario {
  StageKind kind = StageKind::distill;
  ModelConfig teacher;
  std::vector<MixerSettings> mixers;
  DType dtype = DType::f64;
  TeacherPlacement placement = TeacherPlacement::look_ahead;
  Weights::Placement weights = Weights::Placement::replicated;
  RecomputePlan recompute = Recompute::none;
  LogitLossOptions loss{.chunk = 7};
  std::int64_t row_tokens = 53;
  std::int64_t rows_per_step = 4;
  std::int64_t steps = 2;
  Masked masked{};

  Row row(std::int64_t position) const {
    return random_row(position, row_tokens, teacher.vocabulary, masked);
  }

  StageRows rows() const {
    return stage_rows(
        [this](std::int64_t position) { return row(position); }, rows_per_step, steps);
  }
};

// What a few optimiser steps leave behind.
struct Outcome {
  std::vector<double> losses;  // loss, kl, ce of each step, and the layers' losses
  std::vector<double> norms;
  std::vector<double> kept;
  NamedValues gradients;  // of the first step
  NamedValues weights;    // after the last
};

// `scenario.steps` steps on the mesh; the world is of the backend. Collective.
Outcome train(const Scenario& scenario,
              Backend& backend,
              std::unique_ptr<Communicator> world,
              const MeshCounts& counts);

// double: sums of some thousand terms in another order, 1e-10 of the tensor's or 1 % of the largest
// gradient. float32: the bounds of the specification for float32 against its references, and of its
// ten AdamW steps for weights.
void expect_same_training(const Outcome& got, const Outcome& want, DType dtype);

// The same bits of everything.
void expect_same_bits(const Outcome& a, const Outcome& b);

}  // namespace bifocal::test
