// Work by kind over its speed, and traffic over its links.
#include "plan/step_time.h"

#include <algorithm>
#include <functional>

#include "core/error.h"
#include "plan/step_flop.h"

namespace bifocal {

namespace {

// Until the first byte of an exchange that the kernels wait for: a layer's halo and states take
// 0.12 and 0.14 ms on two GPUs (docs/results/h200.md), of which the bytes are a tenth.
constexpr double kExchangeSeconds = 1e-4;

double number(std::int64_t count) {
  return static_cast<double>(count);
}

// Seconds of work on one row.
class Work {
 public:
  Work(const RunConfig& config, const GpuSpeed& gpu, std::vector<std::int64_t> documents)
      : gpu_(gpu),
        documents_(std::move(documents)),
        tokens_(number(config.data.row_tokens)),
        type_bytes_(number(static_cast<std::int64_t>(size_of(compute_type(config))))) {}

  double products(double flop) const { return flop / gpu_.products; }

  double attention(const MixerSettings& mixer, double forward, double backward) const {
    return mixer.is_full() ? (forward + backward) / gpu_.full_attention
                           : forward / gpu_.window_forward + backward / gpu_.window_backward;
  }

  // Elements of the compute type that are read or written a token.
  double elements(double count) const { return count * tokens_ * type_bytes_ / gpu_.memory; }

  struct Layer {
    double mixer = 0.0;        // projections to the mixed heads
    double elementwise = 0.0;  // of the mixer: norms and rope of q and k, features, the gate
    double gate_up = 0.0;      // products that "mlp" computes again
    double rest = 0.0;         // output and down projection
    double norms = 0.0;        // with residual sums, and SwiGLU

    double total() const { return mixer + elementwise + gate_up + rest + norms; }
  };

  Layer forward(const ModelConfig& model, const MixerSettings& mixer) const {
    const LayerFlop flop = layer_flop(model, mixer, documents_);
    const double up = 4.0 * tokens_ * number(model.hidden) * number(model.intermediate);
    return {.mixer = products(flop.projections) + attention(mixer, flop.attention, 0.0) +
                     flop.mlstm / gpu_.mlstm_forward,
            .elementwise = elements(2.0 * heads_width(model) + mixed_width(model, mixer)) +
                           flop.features / gpu_.features_forward,
            .gate_up = products(up),
            .rest = products(flop.rest - up),
            .norms = elements(8.0 * number(model.hidden) + 3.0 * number(model.intermediate))};
  }

  // What `level` computes again of a layer whose forward pass takes this.
  double recomputed(const ModelConfig& model, const Layer& forward, Recompute level) const {
    double seconds = 0.0;
    seconds += level >= Recompute::light ? forward.elementwise + forward.norms : 0.0;
    seconds += level >= Recompute::mlp ? forward.gate_up : 0.0;
    seconds += level >= Recompute::mixer ? forward.mixer : 0.0;
    const double output = 2.0 * tokens_ * number(model.attention_width()) * number(model.hidden);
    return seconds + (level == Recompute::block ? products(output) : 0.0);
  }

  // mixer_only: as stage 1, where projections learn or not.
  double backward(const ModelConfig& model, const MixerSettings& mixer) const {
    const LayerFlop flop = layer_backward_flop(model, mixer, documents_);
    return products(flop.projections + flop.rest) + attention(mixer, 0.0, flop.attention) +
           new_tensors(flop) + elements(mixer_elements(model, mixer)) +
           elements(8.0 * number(model.hidden) + 5.0 * number(model.intermediate));
  }

  double align_backward(const ModelConfig& model,
                        const MixerSettings& mixer,
                        bool trains_projections) const {
    const LayerFlop flop = layer_backward_flop(model, mixer, documents_);
    const double projections = products(flop.projections) + attention(mixer, 0.0, flop.attention);
    return new_tensors(flop) + elements(mixer_elements(model, mixer)) +
           (trains_projections ? projections : 0.0);
  }

  double head(double flop) const { return flop / gpu_.head; }

 private:
  static double heads_width(const ModelConfig& model) {
    return number(model.attention_width() + model.kv_width());
  }

  // Reads both branches and writes their mix.
  static double mixed_width(const ModelConfig& model, const MixerSettings& mixer) {
    return mixer.has_near() && mixer.has_far() ? 3.0 * number(model.attention_width()) : 0.0;
  }

  static double mixer_elements(const ModelConfig& model, const MixerSettings& mixer) {
    return 3.0 * heads_width(model) + 5.0 / 3.0 * mixed_width(model, mixer);
  }

  double new_tensors(const LayerFlop& backward) const {
    return backward.features / gpu_.features_backward + backward.mlstm / gpu_.mlstm_backward;
  }

  const GpuSpeed& gpu_;
  std::vector<std::int64_t> documents_;
  double tokens_;
  double type_bytes_;
};

std::vector<std::int64_t> documents_of(std::int64_t row_tokens, std::int64_t document_tokens) {
  std::vector<std::int64_t> documents;
  const std::int64_t each = document_tokens == 0 ? row_tokens : document_tokens;
  for (std::int64_t left = row_tokens; left > 0; left -= each) {
    documents.push_back(std::min(left, each));
  }
  return documents;
}

class Prediction {
 public:
  Prediction(const PlanInputs& inputs,
             const Plan& plan,
             const PlannedStage& stage,
             const MachineAssumptions& machine)
      : in_(inputs),
        config_(inputs.config),
        plan_(plan),
        stage_(stage),
        machine_(machine),
        work_(config_, machine.gpu, documents_of(config_.data.row_tokens, machine.document_tokens)),
        type_bytes_(number(static_cast<std::int64_t>(size_of(compute_type(config_))))) {}

  StageTime predict() {
    if (stage_.kind == StageKind::align) {
      align();
    } else {
      distill();
    }
    optimizer();
    weights_and_gradients();
    if (in_.teacher) {
      teacher_traffic();
    }
    if (shards_rows()) {
      shard_traffic();
    }
    for (const Traffic& traffic : time_.traffic) {
      time_.step.communication += traffic.seconds;
    }
    return time_;
  }

 private:
  bool is_align() const { return stage_.kind == StageKind::align; }

  bool runs_ahead() const { return plan_.placement.work == TeacherPlacement::look_ahead; }

  // Whether ranks of a sequence group work on parts of one row.
  bool shards_rows() const { return plan_.mesh.sequence > 1 && !(is_align() && runs_ahead()); }

  // Rows that a rank works at in a step, whole ones or its parts of them.
  double turns() const {
    const double ranks = shards_rows() ? number(plan_.mesh.data) : number(plan_.ranks);
    return number(plan_.rows_per_step) / ranks;
  }

  // Whole rows of work: what its parts of rows add up to.
  double rows() const { return number(plan_.rows_per_step) / number(plan_.ranks); }

  void distill() {
    const std::vector<std::int64_t> row =
        documents_of(config_.data.row_tokens, machine_.document_tokens);
    const StepFlop flop = step_flop(in_.student, in_.teacher ? &*in_.teacher : nullptr, row);
    StepSeconds& step = time_.step;
    step.teacher = rows() * teacher_row();
    step.head = rows() * work_.head(flop.head);
    for (std::int64_t layer = 0; layer < in_.student.layers; ++layer) {
      const MixerSettings& mixer = in_.student.mixers[static_cast<std::size_t>(layer)];
      const Work::Layer forward = work_.forward(in_.student, mixer);
      step.student_forward += rows() * forward.total();
      step.student_backward += rows() * work_.backward(in_.student, mixer);
      step.recomputed +=
          rows() * work_.recomputed(
                       in_.student, forward, stage_.recompute.of_layer(layer, in_.student.layers));
    }
  }

  void align() {
    const bool projections = config_.align_extra.trainable == "mixer";
    StepSeconds& step = time_.step;
    step.teacher = rows() * teacher_row();
    for (const MixerSettings& mixer : in_.student.mixers) {
      const Work::Layer forward = work_.forward(in_.student, mixer);
      step.student_forward += rows() * (forward.mixer + forward.elementwise);
      step.student_backward += rows() * work_.align_backward(in_.student, mixer, projections);
    }
  }

  double teacher_row() const {
    double seconds = 0.0;
    if (in_.teacher) {
      for (const MixerSettings& mixer : in_.teacher->mixers) {
        seconds += work_.forward(*in_.teacher, mixer).total();
      }
    }
    return seconds;
  }

  // The norm reads gradients; the update reads and writes masters and moments, reads gradients
  // again and writes weights; the next step begins with zeros.
  void optimizer() {
    const double moment = number(static_cast<std::int64_t>(size_of(moment_type(config_))));
    const double sums = number(static_cast<std::int64_t>(size_of(sum_type(compute_type(config_)))));
    const double moments = 4.0 * moment * number(plan_.part_elements);
    const double rest = (5.0 * sums + type_bytes_) * number(plan_.part_elements);
    time_.step.optimizer = keeps_moments_on_host(config_)
                               ? moments / machine_.gpu.host + rest / machine_.gpu.memory
                               : (moments + rest) / machine_.gpu.memory;
  }

  // Each rank of the group receives all but its own part of `bytes`, `times` a step.
  void add_ring(const std::string& what, std::int64_t group, double bytes, double times) {
    if (group == 1) {
      return;
    }
    const bool crosses = group > plan_.ranks_per_node;
    Traffic traffic{.what = what, .group = static_cast<int>(group), .crosses_hosts = crosses};
    traffic.rank_bytes = times * bytes * number(group - 1) / number(group);
    traffic.host_bytes = crosses ? traffic.rank_bytes : 0.0;
    const double host = machine_.network * number(plan_.ranks_per_node);
    const double rate = crosses ? std::min(machine_.gpu.link, host) : machine_.gpu.link;
    traffic.seconds = traffic.rank_bytes / rate;
    time_.traffic.push_back(traffic);
  }

  // Each rank of a sequence group receives `bytes` from the others, in `exchanges` of which it
  // waits for each.
  void add_exchange(const std::string& what, double bytes, double exchanges) {
    const std::int64_t group = plan_.mesh.sequence;
    const bool crosses = group > plan_.ranks_per_node;
    Traffic traffic{.what = what, .group = static_cast<int>(group), .crosses_hosts = crosses};
    traffic.rank_bytes = bytes;
    const double own = number(plan_.ranks_per_node);
    const double outside = crosses ? (number(group) - own) / (number(group) - 1.0) : 0.0;
    traffic.host_bytes = own * outside * bytes;
    traffic.seconds = (1.0 - outside) * bytes / machine_.gpu.link +
                      outside * bytes / machine_.network + exchanges * kExchangeSeconds;
    time_.traffic.push_back(traffic);
  }

  void weights_and_gradients() {
    const bool is_sharded = config_.memory.weights == "shard";
    const double passes = is_align() ? 1.0 : 2.0;
    const double elements = number(plan_.part_elements) * number(plan_.ranks);
    add_ring("student weights",
             plan_.ranks,
             type_bytes_ * elements,
             is_sharded ? passes * turns() : 1.0);
    const double sums = number(static_cast<std::int64_t>(size_of(sum_type(compute_type(config_)))));
    add_ring("gradients", plan_.ranks, sums * elements, turns());
  }

  void teacher_traffic() {
    const double storage = number(static_cast<std::int64_t>(size_of(in_.teacher_storage)));
    const double bytes =
        storage * number(plan_.teacher_part_elements) * number(plan_.ranks_per_node);
    add_ring("teacher weights", plan_.ranks_per_node, bytes, runs_ahead() ? rows() : turns());
  }

  void shard_traffic() {
    const double sequence = number(plan_.mesh.sequence);
    const double others = (sequence - 1.0) / sequence;
    const double tokens = number(config_.data.row_tokens) / sequence;
    if (in_.teacher && runs_ahead()) {
      add_exchange("teacher hidden states",
                   turns() * others * tokens * number(in_.teacher->hidden) * type_bytes_,
                   turns() / sequence);
    }
    if (in_.teacher && !runs_ahead()) {
      const double widths = 2.0 * number(in_.teacher->attention_width() + in_.teacher->kv_width());
      const double layers = number(in_.teacher->layers);
      add_exchange("teacher heads",
                   turns() * layers * others * tokens * widths * type_bytes_,
                   4.0 * turns() * layers);
    }
    halo(others > 0.0 ? tokens : 0.0);
    states();
  }

  // Forward keys and values, backward their gradients.
  void halo(double tokens) {
    double bytes = 0.0;
    double exchanges = 0.0;
    for (const MixerSettings& mixer : in_.student.mixers) {
      if (mixer.has_near() && !mixer.is_full()) {
        const double most = number(config_.data.row_tokens) - tokens;
        const double read = std::min(number(mixer.window - 1), most) + number(mixer.sink_tokens);
        bytes += 4.0 * read * number(in_.student.kv_width()) * type_bytes_;
        exchanges += 2.0;
      }
    }
    if (exchanges > 0.0) {
      add_exchange("window halo", turns() * bytes, turns() * exchanges);
    }
  }

  void states() {
    double bytes = 0.0;
    double exchanges = 0.0;
    const double sums = number(static_cast<std::int64_t>(size_of(sum_type(compute_type(config_)))));
    for (const MixerSettings& mixer : in_.student.mixers) {
      if (mixer.has_far()) {
        const std::int64_t dim = in_.student.head_dim;
        const double summary = number(mixer.num_states(in_.student.heads, in_.student.kv_heads)) *
                               number(2 * (dim * dim + dim) + 3);
        bytes += summary * sums * (number(plan_.mesh.sequence) - 1.0);
        exchanges += 2.0;
      }
    }
    if (exchanges > 0.0) {
      add_exchange("mLSTM states", turns() * bytes, turns() * exchanges);
    }
  }

  const PlanInputs& in_;
  const RunConfig& config_;
  const Plan& plan_;
  const PlannedStage& stage_;
  const MachineAssumptions& machine_;
  Work work_;
  double type_bytes_;
  StageTime time_;
};

}  // namespace

double StageTime::days(std::int64_t steps) const {
  return step.total() * number(steps) / 86400.0;
}

double StageTime::gpu_hours(std::int64_t steps, int ranks) const {
  return step.total() * number(steps) * number(ranks) / 3600.0;
}

StageTime predict_stage(const PlanInputs& inputs,
                        const Plan& plan,
                        const PlannedStage& stage,
                        const MachineAssumptions& machine) {
  BIFOCAL_REQUIRE(machine.network > 0.0 && machine.gpu.link > 0.0 && machine.document_tokens >= 0,
                  "[plan] wanted positive speeds of links and network, got {} and {} bytes/s",
                  machine.gpu.link,
                  machine.network);
  return Prediction(inputs, plan, stage, machine).predict();
}

}  // namespace bifocal
