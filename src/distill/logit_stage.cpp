// Stage 2 and pretraining.
#include "distill/logit_stage.h"

namespace bifocal {

LogitStage::LogitStage(Context context,
                       Decoder& student,
                       Decoder* teacher,
                       const Mesh& mesh,
                       TeacherPlacement placement,
                       const RecomputePlan& recompute,
                       const LogitLossOptions& options,
                       StageRows rows)
    : Stage(context, mesh, student.weights().table()),
      student_(&student),
      recompute_(recompute),
      rows_(std::move(rows)),
      loss_{context, student, teacher, options} {
  if (teacher == nullptr) {
    BIFOCAL_ASSERT(options.ce_share == 1.0);
    return;
  }
  const std::int64_t each = rows_.per_step / mesh.data_count();
  feed_ = std::make_unique<TeacherFeed>(
      context,
      *teacher,
      mesh.sequence(),
      placement,
      [this](std::int64_t index) {
        return rows_.of_group(index, this->mesh().data_index(), this->mesh().data_count());
      },
      each * rows_.steps);
}

void LogitStage::queue_step(std::int64_t step, Gradients& gradients, const TensorView& sums) {
  phase(context(), "rows");
  const std::int64_t each = rows_.per_step / mesh().data_count();
  std::vector<Row> rows;
  double counts[2] = {0.0, 0.0};
  for (std::int64_t index = 0; index < each; ++index) {
    rows.push_back(rows_.of_group(step * each + index, mesh().data_index(), mesh().data_count()));
    if (mesh().sequence_index() != 0) {
      continue;
    }
    const RowCounts row_counts = count_kept(rows.back());
    counts[0] += row_counts.kept;
    counts[1] += row_counts.with_next;
  }
  mesh().world().all_reduce_sum({counts, DType::f64, {2}});
  counts_ = {.kept = counts[0], .with_next = counts[1]};
  const LogitLossWeights weights = logit_loss_weights(loss_.options, counts_);

  for (std::int64_t index = 0; index < each; ++index) {
    phase(context(), "rows");
    const Row& row = rows[static_cast<std::size_t>(index)];
    RowShard shard = make_row_shard(context(), row, mesh().sequence());
    Tensor teacher_hidden;
    if (feed_) {
      phase(context(), "teacher forward");
      teacher_hidden = feed_->hidden(step * each + index, shard);
    }
    phase(context(), "student forward");
    DecoderKept kept;
    Tensor hidden = student_->forward_kept(shard.layout, shard.ids, recompute_, kept);
    phase(context(), "head and loss");
    const Tensor d_hidden =
        context().memory.empty(Region::activations, context().dtype, hidden.shape());
    loss_({.shard = shard,
           .row = row,
           .hidden = hidden,
           .teacher_hidden = teacher_hidden,
           .d_hidden = d_hidden,
           .sums = sums},
          weights,
          gradients);
    teacher_hidden = Tensor();
    hidden = Tensor();
    phase(context(), "student backward");
    student_->backward(shard.layout, kept, d_hidden, gradients);
  }
}

StepResult LogitStage::result(const std::vector<double>& sums) const {
  const LogitLossWeights weights = logit_loss_weights(loss_.options, counts_);
  StepResult result;
  result.kept = counts_.kept;
  result.loss = weights.kl * sums[0] + weights.ce * sums[1];
  if (feed_ && counts_.kept > 0.0) {
    result.kl = sums[0] / counts_.kept;
  }
  if (counts_.with_next > 0.0) {
    result.ce = sums[1] / counts_.with_next;
  }
  result.unit_factors.assign(student_->weights().table().units().size(), 1.0);
  return result;
}

}  // namespace bifocal
