// One token of each chosen sequence through the model: ops that find all they need on the device.
#include <algorithm>

#include "generate/generator.h"
#include "ops/rope.h"
#include "ops/transfer.h"

namespace bifocal {

void Generator::choose(std::span<const std::int64_t> slots) {
  const bool same = std::ranges::equal(slots, slots_);
  if (!same) {
    slots_.assign(slots.begin(), slots.end());
    const std::vector<std::int32_t> sequences(slots.begin(), slots.end());
    const auto rows = static_cast<std::int64_t>(slots.size());
    run(context_.stream,
        Upload{.y = row_sequences_.rows(0, rows), .x = {sequences.data(), DType::i32, {rows}}});
    ++revision_;
  }
  make_room();
}

void Generator::make_room() {
  for (const std::int64_t slot : slots_) {
    for (LayerCache& cache : caches_) {
      revision_ += cache.make_room(slot, tokens(slot) + 1) ? 1 : 0;
    }
  }
}

void Generator::count_step() {
  for (const std::int64_t slot : slots_) {
    ++positions_.at(static_cast<std::size_t>(slot));
  }
}

Generator::StepRows Generator::queue_step() {
  const ModelConfig& model = config();
  const auto rows = static_cast<std::int64_t>(slots_.size());
  const StepRows step{.logits = take_sums(Use::logits, {rows, model.vocabulary}),
                      .sequences = row_sequences_.rows(0, rows),
                      .streams = row_streams_.rows(0, rows),
                      .indices = row_indices_.rows(0, rows),
                      .ids = row_ids_.rows(0, rows)};
  const TensorView positions = row_positions_.rows(0, rows);
  Stream& stream = context_.stream;
  run(stream,
      StepBegin{.ids = step.ids,
                .positions = positions,
                .streams = row_streams_.rows(0, rows),
                .indices = row_indices_.rows(0, rows),
                .state = state_,
                .sequences = step.sequences});
  for (const auto& [kind, at] : places_) {
    run(stream,
        CachePlaces{.places = at.places.rows(0, rows),
                    .lengths = at.lengths.rows(0, rows),
                    .positions = positions,
                    .window = kind.first,
                    .pinned = kind.second});
  }
  const Shape angles{rows, model.head_dim / 2};
  run(stream,
      RopeTable{.cos = take_sums(Use::cos, angles),
                .sin = take_sums(Use::sin, angles),
                .positions = positions,
                .frequencies = frequencies_});
  const TensorView x = take(Use::x, {rows, model.hidden});
  run(stream, DecodeEmbedding{.y = x, .ids = step.ids, .table = weights_.embedding()});
  for (std::int64_t index = 0; index < model.layers; ++index) {
    step_layer(index, rows, x);
  }
  const DecodeProduct head{.y = take_sums(Use::logits, {rows, model.vocabulary}),
                           .weight = weights_.head()};
  run(stream,
      DecodeProducts{
          .products = {&head, 1}, .x = x, .norm = weights_.final_norm(), .eps = model.norm_eps});
  return step;
}

void Generator::step_layer(std::int64_t index, std::int64_t rows, const TensorView& x) {
  const ModelConfig& model = config();
  const LayerWeights& w = weights_.layer(index);
  Stream& stream = context_.stream;
  const TensorView heads = step_mixer(index, rows, x);
  const DecodeProduct out{.y = x, .weight = w.o, .add = x};
  run(stream,
      DecodeProducts{.products = {&out, 1}, .x = heads.reshape({rows, model.attention_width()})});
  const TensorView act = take(Use::up, {rows, model.intermediate});
  run(stream,
      DecodeGatedProduct{.y = act,
                         .x = x,
                         .norm = w.post_norm,
                         .gate = w.mlp_gate,
                         .up = w.mlp_up,
                         .eps = model.norm_eps});
  const DecodeProduct down{.y = x, .weight = w.mlp_down, .add = x};
  run(stream, DecodeProducts{.products = {&down, 1}, .x = act});
}

// The mixed heads [rows, H, d].
TensorView Generator::step_mixer(std::int64_t index, std::int64_t rows, const TensorView& x) {
  const ModelConfig& model = config();
  const LayerWeights& w = weights_.layer(index);
  const LayerCache& cache = caches_[static_cast<std::size_t>(index)];
  const MixerSettings& settings = cache.settings();
  const std::int64_t states = settings.num_states(model.heads, model.kv_heads);
  const Shape q_shape{rows, model.heads, model.head_dim};
  const Shape k_shape{rows, model.kv_heads, model.head_dim};
  const TensorView projected_q = take(Use::mixed, q_shape);
  const TensorView projected_k = take(Use::k, k_shape);
  const TensorView v = take(Use::v, k_shape);
  std::vector<DecodeProduct> products = {
      {.y = projected_q.reshape({rows, model.attention_width()}), .weight = w.q, .bias = w.q_bias},
      {.y = projected_k.reshape({rows, model.kv_width()}), .weight = w.k, .bias = w.k_bias},
      {.y = v.reshape({rows, model.kv_width()}), .weight = w.v, .bias = w.v_bias}};
  DecodeHeads heads{.q = take(Use::q, q_shape),
                    .projected_q = projected_q,
                    .projected_k = projected_k,
                    .v = v,
                    .q_norm = w.q_norm,
                    .k_norm = w.k_norm,
                    .cos = take_sums(Use::cos, {rows, model.head_dim / 2}),
                    .sin = take_sums(Use::sin, {rows, model.head_dim / 2}),
                    .eps = model.norm_eps};
  DecodeMixer mixer{
      .y = take(Use::near, q_shape),
      .workspace = scratch_.take(
          Use::workspace, DType::f32, {decode_mixer_workspace(rows, model.heads, model.head_dim)})};
  if (settings.has_far()) {
    const MlstmState all = cache.states();
    mixer.far = {.c = all.c,
                 .n = all.n,
                 .m = all.m,
                 .q = take(Use::feature_q, q_shape),
                 .k = take(Use::feature_k, {rows, states, model.head_dim}),
                 .v = v,
                 .i_gate = take_sums(Use::i_gate, {rows, states}),
                 .f_gate = take_sums(Use::f_gate, {rows, states}),
                 .sequences = row_sequences_.rows(0, rows)};
    heads.feature_q = take(Use::feature_q, q_shape);
    heads.feature_k = take(Use::feature_k, {rows, states, model.head_dim});
    heads.feature_q_weight = w.feature_q;
    heads.feature_k_weight = w.feature_k;
    products.push_back({.y = take_sums(Use::i_gate, {rows, states}), .weight = w.i_gate});
    products.push_back(
        {.y = take_sums(Use::f_gate, {rows, states}), .weight = w.f_gate, .bias = w.f_gate_bias});
  }
  if (settings.has_gate()) {
    const TensorView gate = take_sums(Use::step_o_gate, {rows, model.heads});
    products.push_back({.y = gate, .weight = w.o_gate, .bias = w.o_gate_bias});
    mixer.gate = gate;
  }
  std::vector<TensorView> keys;
  std::vector<TensorView> values;
  std::vector<ConstTensorView> read_keys;
  std::vector<ConstTensorView> read_values;
  if (settings.has_near()) {
    for (const std::int64_t slot : slots_) {
      keys.push_back(cache.keys(slot));
      values.push_back(cache.values(slot));
      read_keys.emplace_back(keys.back());
      read_values.emplace_back(values.back());
    }
    const Places& at = places_.at(kind_of(settings));
    heads.k_cache = keys;
    heads.v_cache = values;
    heads.places = at.places.rows(0, rows);
    mixer.near = {.q = heads.q,
                  .k = read_keys,
                  .v = read_values,
                  .lengths = at.lengths.rows(0, rows),
                  .newest = heads.places,
                  .sink = settings.sink == Sink::learned ? w.sink : ConstTensorView{}};
  }
  Stream& stream = context_.stream;
  run(stream,
      DecodeProducts{.products = products, .x = x, .norm = w.input_norm, .eps = model.norm_eps});
  run(stream, heads);
  run(stream, mixer);
  return mixer.y;
}

}  // namespace bifocal
