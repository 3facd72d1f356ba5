// Stage 1, layer by layer under the teacher's forward pass.
#include "distill/align_stage.h"

#include "ops/distill_loss.h"

namespace bifocal {

AlignTrainable align_trainable(const RunConfig& config) {
  return config.align_extra.trainable == "mixer" ? AlignTrainable::mixer
                                                 : AlignTrainable::new_tensors;
}

AlignStage::AlignStage(Context context,
                       Decoder& student,
                       Decoder& teacher,
                       const Mesh& mesh,
                       TeacherPlacement placement,
                       AlignTrainable trainable,
                       StageRows rows)
    : Stage(context, mesh, student.weights().table()),
      student_(&student),
      teacher_(&teacher),
      placement_(placement),
      trainable_(trainable),
      rows_(std::move(rows)),
      self_(mesh.world().split(mesh.world().rank())) {
  for (const MixerSettings& settings : student.config().mixers) {
    mixers_.emplace_back(context, student.config(), settings);
  }
}

bool AlignStage::trains(const Parameter& parameter) const {
  return parameter.is_new() || (trainable_ == AlignTrainable::mixer && parameter.in_mixer);
}

void AlignStage::run_row(RowShard& shard, const TensorView& sums, Gradients& gradients) {
  Weights& weights = student_->weights();
  const ParameterTable& table = weights.table();
  Context row_context = context();
  const std::int64_t layers = student_->config().layers;
  const Rope rope = make_rope(row_context, student_->config(), shard.layout.positions());
  const auto align_layer = [&](std::int64_t layer, const Block::Observation& seen) {
    phase(row_context, "student forward");
    const std::int64_t unit = table.layer_unit(layer);
    const std::int64_t next = layer + 1 < layers ? table.layer_unit(layer + 1) : -1;
    const LayerWeights layer_tensors = layer_weights(table, layer, weights.acquire(unit, next));
    const LayerGradients layer_sums = layer_gradients(table, layer, gradients.open(unit));
    Mixer& mixer = mixers_[static_cast<std::size_t>(layer)];
    IncomingState incoming;
    const MixerInputs in{layer_tensors, shard.layout, rope, seen.input};
    MixerKept kept = mixer.forward(in, incoming);
    phase(row_context, "head and loss");
    Tensor d_heads =
        row_context.memory.empty(Region::activations, row_context.dtype, seen.heads.shape);
    run(row_context.stream,
        AlignLoss{.d_student = d_heads,
                  .sums = sums.rows(2 * layer, 2 * layer + 2),
                  .student = kept.heads(),
                  .teacher = seen.heads,
                  .keep = shard.keep});
    phase(row_context, "student backward");
    mixer.backward(
        in,
        kept,
        incoming,
        std::move(d_heads),
        {.gradients = layer_sums, .d_x = {}, .projections = trainable_ == AlignTrainable::mixer});
    weights.release(unit);
    gradients.close(unit);
    phase(row_context, "teacher forward");
  };
  const auto attention =
      shard.layout.group().size() > 1 ? Block::Attention::ulysses : Block::Attention::by_tokens;
  phase(row_context, "teacher forward");
  teacher_->forward(shard.layout, shard.ids, align_layer, attention);
}

void AlignStage::queue_step(std::int64_t step, Gradients& gradients, const TensorView& sums) {
  const bool whole_rows = placement_ == TeacherPlacement::look_ahead;
  Communicator& world = mesh().world();
  Communicator& group = whole_rows ? *self_ : mesh().sequence();
  const std::int64_t groups = whole_rows ? world.size() : mesh().data_count();
  const std::int64_t mine = whole_rows ? world.rank() : mesh().data_index();
  const std::int64_t each = rows_.per_step / groups;
  kept_ = 0.0;
  for (std::int64_t index = 0; index < each; ++index) {
    phase(context(), "rows");
    const Row row = rows_.of_group(step * each + index, mine, groups);
    if (group.rank() == 0) {
      kept_ += count_kept(row).kept;
    }
    RowShard shard = make_row_shard(context(), row, group);
    run_row(shard, sums, gradients);
  }
  world.all_reduce_sum({&kept_, DType::f64, {1}});
}

StepResult AlignStage::result(const std::vector<double>& sums) const {
  const std::int64_t layers = student_->config().layers;
  const ParameterTable& table = student_->weights().table();
  StepResult result;
  result.kept = kept_;
  result.unit_factors.assign(table.units().size(), 0.0);
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    const double error = sums[static_cast<std::size_t>(2 * layer)];
    const double energy = sums[static_cast<std::size_t>(2 * layer) + 1];
    const double factor = energy > 0.0 ? 1.0 / energy : 0.0;
    result.layer_losses.push_back(error * factor);
    result.loss += error * factor / static_cast<double>(layers);
    result.unit_factors[static_cast<std::size_t>(table.layer_unit(layer))] = factor;
  }
  return result;
}

}  // namespace bifocal
