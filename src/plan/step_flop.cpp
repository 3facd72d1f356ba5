// Counts of a step.
#include "plan/step_flop.h"

#include <algorithm>
#include <numeric>

namespace bifocal {

namespace {

double number(std::int64_t count) {
  return static_cast<double>(count);
}

double tokens_of(std::span<const std::int64_t> documents) {
  return number(std::accumulate(documents.begin(), documents.end(), std::int64_t{0}));
}

double pairs_of(std::span<const std::int64_t> documents, const MixerSettings& mixer) {
  double pairs = 0.0;
  for (const std::int64_t tokens : documents) {
    const double seen =
        number(mixer.is_full() ? tokens : std::min(mixer.window + mixer.sink_tokens, tokens));
    pairs += number(tokens) * seen - seen * (seen - 1.0) / 2.0;
  }
  return pairs;
}

// Sizes of the mLSTM's products, see ops/cost.h.
struct MlstmProducts {
  double heads, states, inside;
};

MlstmProducts mlstm_products(const ModelConfig& model, const MixerSettings& mixer, double tokens) {
  const double heads = number(model.heads);
  const double states = number(mixer.num_states(model.heads, model.kv_heads));
  const double dim = number(model.head_dim);
  return {2.0 * tokens * heads * dim * dim,
          2.0 * tokens * states * dim * dim,
          tokens * number(kCountedChunk) * heads * dim};
}

double mlstm_backward_flop(const ModelConfig& model, const MixerSettings& mixer, double tokens) {
  if (!mixer.has_far()) {
    return 0.0;
  }
  const MlstmProducts products = mlstm_products(model, mixer, tokens);
  return 2.0 * products.heads + 3.0 * products.states + 5.0 * products.inside;
}

}  // namespace

LayerFlop layer_flop(const ModelConfig& model,
                     const MixerSettings& mixer,
                     std::span<const std::int64_t> documents) {
  const double tokens = tokens_of(documents);
  const double states = number(mixer.num_states(model.heads, model.kv_heads));
  const double width = number(model.attention_width());
  const double hidden = number(model.hidden);
  const double dim = number(model.head_dim);
  double out = width + 2.0 * number(model.kv_width()) + 2.0 * states;
  out += mixer.has_gate() ? number(model.heads) : 0.0;
  LayerFlop flop;
  flop.projections = 2.0 * tokens * hidden * out;
  flop.rest = 2.0 * tokens * hidden * (width + 3.0 * number(model.intermediate));
  if (mixer.has_near()) {
    flop.attention = 4.0 * pairs_of(documents, mixer) * width;
  }
  if (mixer.has_far()) {
    const MlstmProducts products = mlstm_products(model, mixer, tokens);
    flop.features = 2.0 * tokens * (number(model.heads) + states) * dim * dim;
    flop.mlstm = products.heads + products.states + 2.0 * products.inside;
  }
  return flop;
}

LayerFlop layer_backward_flop(const ModelConfig& model,
                              const MixerSettings& mixer,
                              std::span<const std::int64_t> documents) {
  const LayerFlop forward = layer_flop(model, mixer, documents);
  return {.projections = 2.0 * forward.projections,
          .attention = 2.5 * forward.attention,
          .features = 2.0 * forward.features,
          .mlstm = mlstm_backward_flop(model, mixer, tokens_of(documents)),
          .rest = 2.0 * forward.rest};
}

StepFlop step_flop(const ModelConfig& student,
                   const ModelConfig* teacher,
                   std::span<const std::int64_t> documents) {
  const double tokens = tokens_of(documents);
  StepFlop flop;
  for (const MixerSettings& mixer : student.mixers) {
    flop.student_forward += layer_flop(student, mixer, documents).total();
    flop.student_backward += layer_backward_flop(student, mixer, documents).total();
  }
  flop.recomputed = flop.student_forward;
  flop.head = 3.0 * 2.0 * tokens * number(student.hidden) * number(student.vocabulary);
  if (teacher != nullptr) {
    for (const MixerSettings& mixer : teacher->mixers) {
      flop.teacher_forward += layer_flop(*teacher, mixer, documents).total();
    }
    flop.head += 2.0 * tokens * number(teacher->hidden) * number(teacher->vocabulary);
  }
  return flop;
}

StepFlop align_flop(const ModelConfig& student,
                    const ModelConfig& teacher,
                    std::span<const std::int64_t> documents,
                    bool trains_projections) {
  StepFlop flop;
  for (const MixerSettings& mixer : teacher.mixers) {
    flop.teacher_forward += layer_flop(teacher, mixer, documents).total();
  }
  for (const MixerSettings& mixer : student.mixers) {
    const LayerFlop backward = layer_backward_flop(student, mixer, documents);
    flop.student_forward += layer_flop(student, mixer, documents).mixer();
    flop.student_backward +=
        trains_projections ? backward.mixer() : backward.features + backward.mlstm;
  }
  return flop;
}

}  // namespace bifocal
