// Stage 2 (KL to the teacher over the whole vocabulary, with a share of cross-entropy) and
// pretraining (cross-entropy alone): the student end to end, all parameters train.
#pragma once

#include "distill/logit_loss.h"
#include "distill/stage.h"

namespace bifocal {

class LogitStage : public Stage {
 public:
  // teacher: none for pretraining, which needs options.ce_share = 1.
  LogitStage(Context context,
             Decoder& student,
             Decoder* teacher,
             const Mesh& mesh,
             TeacherPlacement placement,
             Recompute recompute,
             const LogitLossOptions& options,
             StageRows rows);

  StepResult run_step(std::int64_t step, Gradients& gradients) override;

  bool trains(const Parameter&) const override { return true; }

  ClipScope clip_scope() const override { return ClipScope::all_parameters; }

 private:
  Context context_;
  Decoder* student_;
  const Mesh* mesh_;
  Recompute recompute_;
  StageRows rows_;
  LogitLoss loss_;
  std::unique_ptr<TeacherFeed> feed_;
};

}  // namespace bifocal
