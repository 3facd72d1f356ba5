// A dry run of one row of each stage (distill/align_stage.cpp, distill/logit_stage.cpp).
#include "plan/memory_forecast.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "plan/dry_model.h"

namespace bifocal {

namespace {

// What a rank holds throughout, and the models over it.
class DryRun {
 public:
  DryRun(const ForecastInputs& inputs, std::int64_t sequence_index)
      : in_(&inputs),
        compute_(compute_type(inputs.config)),
        ranks_(inputs.mesh.data * inputs.mesh.sequence),
        sequence_index_(sequence_index),
        student_table_(inputs.student),
        student_weights_(ledger_, student_table_, student_options()),
        student_(ledger_, inputs.student, student_weights_, compute_),
        moments_(ledger_),
        gradients_(ledger_, student_table_, ranks_, sum_type(compute_)) {
    if (inputs.teacher != nullptr) {
      teacher_table_.emplace(*inputs.teacher);
      teacher_weights_.emplace(ledger_, *teacher_table_, teacher_options());
      teacher_.emplace(ledger_, *inputs.teacher, *teacher_weights_, compute_);
    }
    for (std::int64_t unit = 0; unit <= student_table_.final_unit(); ++unit) {
      const std::int64_t part = padded_unit_size(student_table_, unit, ranks_) / ranks_;
      for (int moment = 0; moment < 2 && !keeps_moments_on_host(inputs.config); ++moment) {
        moments_.add(Region::optimizer, moment_type(inputs.config), part);
      }
      for (int state = 0; state < 3 && copies_state_here(); ++state) {  // masters and moments
        moments_.add(Region::optimizer, sum_type(compute_), part);
      }
    }
  }

  const PeakBytes& peak() const { return ledger_.peak(); }

  void align() {
    DryShard shard = runs_ahead() ? whole_row() : own_shard();
    const Held sums = step_sums(2 * in_->student.layers);
    const Held ops = scratch(in_->student, shard.tokens());
    const Held rope = student_.rope(shard.tokens());
    teacher_->forward(
        shard, teacher_attention(shard), [&](std::int64_t layer) { align_layer(shard, layer); });
    gradients_.finish();
  }

  // pretrain is the same without a teacher.
  void distill() {
    const Held sums = step_sums(2);
    DryShard shard = own_shard();
    std::vector<Held> teacher_hidden;
    if (teacher_) {
      teacher_hidden = teacher_forward(shard);
    }
    Held hidden = student_.forward_kept(shard, in_->recompute);
    const Held d_hidden = student_.hidden(shard.tokens());
    loss(shard);
    if (!teacher_hidden.empty()) {
      teacher_hidden.pop_back();
    }
    hidden.release();
    const Held ops = scratch(in_->student, shard.tokens());
    student_.backward(shard, gradients_);
  }

  // What evaluate.every puts between steps (evaluate/validation.cpp): both models on a whole row of
  // the rank's own, beside what the look-ahead teacher has left for steps to come.
  void validate() {
    Held waiting(ledger_);
    if (runs_ahead() && in_->mesh.sequence > 1) {
      for (std::int64_t rank = 1; rank < in_->mesh.sequence; ++rank) {
        waiting.add(Region::activations, compute_, own_shard().tokens() * in_->student.hidden);
      }
    }
    DryShard row = whole_row();
    const Held hidden = student_.forward(row, DryAttention::by_tokens, [&](std::int64_t layer) {
      observe_branches(in_->student.mixers[static_cast<std::size_t>(layer)], row.tokens());
    });
    const Held teacher_hidden = teacher_->forward(row, DryAttention::by_tokens, {});
    const std::int64_t chunk = std::min(resolved_logit_chunk(in_->config), row.tokens());
    Held logits(ledger_);
    for (int model = 0; model < 2; ++model) {
      logits.add(Region::loss, sum_type(compute_), chunk * in_->student.vocabulary);
    }
    for (int tensor = 0; tensor < 3; ++tensor) {
      logits.add(Region::loss, DType::f64, chunk);
    }
    logits.add(Region::loss, DType::u8, chunk);
    teacher_weights_->acquire(teacher_->head_unit());
    teacher_weights_->release(teacher_->head_unit());
  }

 private:
  // Gates on their way to the host, then pieces of the gated far heads beside zeros.
  void observe_branches(const MixerSettings& mixer, std::int64_t tokens) {
    constexpr std::int64_t kPiece = 2048;
    if (!mixer.has_gate()) {
      return;
    }
    {
      Held gates(ledger_);
      gates.add(Region::loss, DType::f64, tokens * in_->student.heads);
    }
    Held pieces(ledger_);
    for (int tensor = 0; tensor < 2; ++tensor) {
      pieces.add(Region::loss, compute_, std::min(kPiece, tokens) * in_->student.attention_width());
    }
  }

  // What an op on a GPU needs at most beside its tensors (kernels/mlstm.cu, feature_map_mma.cu):
  // the mLSTM's states and their gradients at every chunk's start, or the gradients of feature
  // logits.
  static std::int64_t scratch_elements(const ModelConfig& model, std::int64_t tokens) {
    constexpr std::int64_t kChunk = 64;
    std::int64_t most = 0;  // float32
    for (const MixerSettings& mixer : model.mixers) {
      if (!mixer.has_far()) {
        continue;
      }
      const std::int64_t states = mixer.num_states(model.heads, model.kv_heads);
      const std::int64_t chunks = (tokens + kChunk - 1) / kChunk + 1;
      const std::int64_t read = 2 * tokens * model.heads + 4 * tokens * states;
      most = std::max({most,
                       2 * chunks * states * model.head_dim * (model.head_dim + 1) + read,
                       tokens * model.attention_width() / 2});
    }
    return std::max(most, tokens * model.heads);
  }

  // On a GPU the copy takes memory of the host, which is not counted.
  bool copies_state_here() const {
    return keeps_state_copy(in_->config) && in_->config.run.device != "cuda";
  }

  Held scratch(const ModelConfig& model, std::int64_t tokens) {
    Held held(ledger_);
    if (in_->config.run.device == "cuda") {
      held.add(Region::scratch, DType::f32, scratch_elements(model, tokens));
    }
    return held;
  }

  DryWeights::Options student_options() const {
    return {.region = Region::weights,
            .ranks = ranks_,
            .is_resident = in_->config.memory.weights == "replicate",
            .storage = compute_,
            .compute = compute_,
            .is_trained = true};
  }

  DryWeights::Options teacher_options() const {
    return {.region = Region::teacher_weights,
            .ranks = in_->node_ranks,
            .is_resident = false,
            .storage = in_->teacher_storage,
            .compute = compute_};
  }

  bool runs_ahead() const { return in_->work == TeacherPlacement::look_ahead; }

  DryShard whole_row() { return {ledger_, in_->config.data.row_tokens, 1, 0}; }

  DryShard own_shard() {
    return {ledger_, in_->config.data.row_tokens, in_->mesh.sequence, sequence_index_};
  }

  static DryAttention teacher_attention(const DryShard& shard) {
    return shard.ranks() > 1 ? DryAttention::ulysses : DryAttention::by_tokens;
  }

  void align_layer(DryShard& shard, std::int64_t layer) {
    const std::int64_t unit = student_table_.layer_unit(layer);
    const bool is_last = layer + 1 == in_->student.layers;
    student_weights_.acquire(unit, is_last ? -1 : student_table_.layer_unit(layer + 1));
    gradients_.open(unit);
    const DryBlock& block = student_.block(layer);
    DryMixerKept kept(ledger_);
    Held incoming(ledger_);
    block.mixer_forward(shard, kept, incoming);
    block.mixer_backward(shard,
                         kept,
                         block.heads(shard),
                         in_->config.align_extra.trainable == "mixer" ? DryGradient::projections
                                                                      : DryGradient::new_tensors);
    student_weights_.release(unit);
    gradients_.close(unit);
  }

  // The slices of hidden states that wait for this rank, the present row's among them.
  std::vector<Held> teacher_forward(DryShard& shard) {
    std::vector<Held> slices;
    if (!runs_ahead()) {
      slices.push_back(teacher_->forward(shard, teacher_attention(shard), {}));
      return slices;
    }
    DryShard row = whole_row();
    Held hidden = teacher_->forward(row, DryAttention::by_tokens, {});
    if (in_->mesh.sequence == 1) {
      slices.push_back(std::move(hidden));
      return slices;
    }
    for (std::int64_t rank = 0; rank < in_->mesh.sequence; ++rank) {
      slices.push_back(teacher_->hidden(shard.tokens()));
    }
    return slices;
  }

  // What a stage brings back from the device.
  Held step_sums(std::int64_t own) {
    Held sums(ledger_);
    sums.add(Region::loss, DType::f64, own + student_table_.final_unit() + 1);
    return sums;
  }

  void loss(const DryShard& shard) {
    student_weights_.acquire(student_.head_unit());
    if (teacher_) {
      teacher_weights_->acquire(teacher_->head_unit());
    }
    const std::int64_t chunk =
        std::min(resolved_logit_chunk(in_->config), std::max<std::int64_t>(1, shard.tokens()));
    Held logits(ledger_);
    const std::int64_t all = chunk * in_->student.vocabulary;
    const DType wide = sum_type(compute_);
    logits.add(Region::loss, wide, all);
    logits.add(Region::loss, wide, teacher_ ? all : 0);
    logits.add(Region::loss, compute_, wide != compute_ ? all : 0);
    for (int tensor = 0; tensor < 4; ++tensor) {  // losses and weights of each token
      logits.add(Region::loss, DType::f64, shard.tokens());
    }
    gradients_.open(student_.head_unit());
    if (teacher_) {
      teacher_weights_->release(teacher_->head_unit());
    }
    student_weights_.release(student_.head_unit());
  }

  Ledger ledger_;
  const ForecastInputs* in_;
  DType compute_;
  std::int64_t ranks_;
  std::int64_t sequence_index_;
  ParameterTable student_table_;
  DryWeights student_weights_;
  DryDecoder student_;
  std::optional<ParameterTable> teacher_table_;
  std::optional<DryWeights> teacher_weights_;
  std::optional<DryDecoder> teacher_;
  Held moments_;
  DryGradients gradients_;
};

}  // namespace

std::string_view name_of(StageKind stage) {
  switch (stage) {
    case StageKind::align:
      return "align";
    case StageKind::distill:
      return "distill";
    case StageKind::pretrain:
      return "pretrain";
  }
  return "unknown";
}

DType compute_type(const RunConfig& config) {
  const std::string dtype = resolved_dtype(config);
  if (dtype == "bfloat16") {
    return DType::bf16;
  }
  return dtype == "float64" ? DType::f64 : DType::f32;
}

DType moment_type(const RunConfig& config) {
  return config.optimizer.moments == "bfloat16" ? DType::bf16 : sum_type(compute_type(config));
}

bool keeps_moments_on_host(const RunConfig& config) {
  return config.optimizer.moments == "host" && config.run.device == "cuda";
}

bool keeps_state_copy(const RunConfig& config) {
  return config.checkpoint.asynchronous && config.checkpoint.every > 0;
}

PeakBytes forecast_memory(const ForecastInputs& inputs,
                          StageKind stage,
                          std::int64_t sequence_index) {
  BIFOCAL_ASSERT((inputs.teacher == nullptr) == (stage == StageKind::pretrain));
  DryRun run(inputs, sequence_index);
  if (stage == StageKind::align) {
    run.align();
  } else {
    run.distill();
  }
  if (inputs.config.evaluate.every > 0 && inputs.teacher != nullptr) {
    run.validate();
  }
  return run.peak();
}

PeakBytes forecast_validation(const ForecastInputs& inputs, std::int64_t sequence_index) {
  BIFOCAL_ASSERT(inputs.teacher != nullptr);
  DryRun run(inputs, sequence_index);
  run.validate();
  return run.peak();
}

}  // namespace bifocal
