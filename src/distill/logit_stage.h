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
             const RecomputePlan& recompute,
             const LogitLossOptions& options,
             StageRows rows);

  bool trains(const Parameter&) const override { return true; }

  ClipScope clip_scope() const override { return ClipScope::all_parameters; }

 protected:
  // KL and cross-entropy.
  std::int64_t sum_count() const override { return 2; }

  void queue_step(std::int64_t step, Gradients& gradients, const TensorView& sums) override;
  StepResult result(const std::vector<double>& sums) const override;

 private:
  Decoder* student_;
  RecomputePlan recompute_;
  StageRows rows_;
  LogitLoss loss_;
  std::unique_ptr<TeacherFeed> feed_;
  RowCounts counts_;  // of the step queued last, over all ranks
};

}  // namespace bifocal
