// Stage 2 and pretraining.
#include "distill/logit_stage.h"

namespace bifocal {

LogitStage::LogitStage(Context context,
                       Decoder& student,
                       Decoder* teacher,
                       const Mesh& mesh,
                       TeacherPlacement placement,
                       Recompute recompute,
                       const LogitLossOptions& options,
                       StageRows rows)
    : context_(context),
      student_(&student),
      mesh_(&mesh),
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
        return rows_.of_group(index, mesh_->data_index(), mesh_->data_count());
      },
      each * rows_.steps);
}

StepResult LogitStage::run_step(std::int64_t step, Gradients& gradients) {
  Communicator& world = mesh_->world();
  const std::int64_t each = rows_.per_step / mesh_->data_count();
  std::vector<Row> rows;
  double counts[2] = {0.0, 0.0};
  for (std::int64_t index = 0; index < each; ++index) {
    rows.push_back(rows_.of_group(step * each + index, mesh_->data_index(), mesh_->data_count()));
    if (mesh_->sequence_index() != 0) {
      continue;
    }
    const RowCounts row_counts = count_kept(rows.back());
    counts[0] += row_counts.kept;
    counts[1] += row_counts.with_next;
  }
  world.all_reduce_sum({counts, DType::f64, {2}});
  const LogitLossWeights weights =
      logit_loss_weights(loss_.options, {.kept = counts[0], .with_next = counts[1]});

  double sums[2] = {0.0, 0.0};
  for (std::int64_t index = 0; index < each; ++index) {
    RowShard shard =
        make_row_shard(context_, rows[static_cast<std::size_t>(index)], mesh_->sequence());
    Tensor teacher_hidden;
    if (feed_) {
      lap(context_, "rows");
      teacher_hidden = feed_->hidden(step * each + index, shard);
      lap(context_, "teacher forward");
    }
    DecoderKept kept;
    const Tensor hidden = student_->forward_kept(shard.layout, shard.ids, recompute_, kept);
    lap(context_, "student forward");
    const Tensor d_hidden =
        context_.memory.empty(Region::activations, context_.dtype, hidden.shape());
    const LogitLossSums row_sums =
        loss_(shard, hidden, teacher_hidden, weights, d_hidden, gradients);
    sums[0] += row_sums.kl;
    sums[1] += row_sums.ce;
    teacher_hidden = Tensor();
    lap(context_, "head and loss");
    student_->backward(shard.layout, kept, d_hidden, gradients);
    lap(context_, "student backward");
  }
  world.all_reduce_sum({sums, DType::f64, {2}});

  StepResult result;
  result.kept = counts[0];
  result.loss = weights.kl * sums[0] + weights.ce * sums[1];
  if (feed_ && counts[0] > 0.0) {
    result.kl = sums[0] / counts[0];
  }
  if (counts[1] > 0.0) {
    result.ce = sums[1] / counts[1];
  }
  result.unit_factors.assign(student_->weights().table().units().size(), 1.0);
  return result;
}

}  // namespace bifocal
