// Stage 1: every student mixer reads the teacher's own activation of its layer and matches its
// attention heads.
#pragma once

#include "config/run_config.h"
#include "distill/stage.h"

namespace bifocal {

enum class AlignTrainable : std::uint8_t {
  new_tensors,  // sink, features, gates
  mixer         // also q, k, v with norms and biases
};

// As align.trainable names it.
AlignTrainable align_trainable(const RunConfig& config);

// Layers are independent, so with look-ahead placement every rank runs teacher and mixers on whole
// rows of its own, which needs per_step divisible by all ranks; with ulysses every row is cut over
// its sequence group.
class AlignStage : public Stage {
 public:
  AlignStage(Context context,
             Decoder& student,
             Decoder& teacher,
             const Mesh& mesh,
             TeacherPlacement placement,
             AlignTrainable trainable,
             StageRows rows);

  bool trains(const Parameter& parameter) const override;

  ClipScope clip_scope() const override { return ClipScope::each_unit; }

 protected:
  // Error and energy of each layer.
  std::int64_t sum_count() const override { return 2 * student_->config().layers; }

  void queue_step(std::int64_t step, Gradients& gradients, const TensorView& sums) override;
  StepResult result(const std::vector<double>& sums) const override;

 private:
  void run_row(RowShard& shard, const TensorView& sums, Gradients& gradients);

  Decoder* student_;
  Decoder* teacher_;
  TeacherPlacement placement_;
  AlignTrainable trainable_;
  StageRows rows_;
  std::unique_ptr<Communicator> self_;
  std::vector<Mixer> mixers_;
  double kept_ = 0.0;  // tokens of the step queued last, over all ranks
};

}  // namespace bifocal
