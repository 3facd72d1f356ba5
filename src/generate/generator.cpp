// Tokens through the model: a chunk of one sequence, or one token of each of several.
#include "generate/generator.h"

#include <algorithm>
#include <numeric>

#include "ops/bifocal_gate.h"
#include "ops/decode_attention.h"
#include "ops/decode_linear.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/feature_map.h"
#include "ops/linear.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"
#include "ops/swiglu.h"

namespace bifocal {

namespace {

// A chunk of fewer rows takes the decoding products: BLAS gains nothing, and bf16 weights would be
// converted for it.
constexpr std::int64_t kLeastBlasRows = 16;

}  // namespace

struct Generator::Step {
  std::span<const std::int64_t> slots;  // one for a chunk
  std::int64_t rows = 0;
  bool is_chunk = false;
  bool wants_logits = true;
  ConstTensorView cos, sin;   // [rows, head_dim / 2]
  ConstTensorView sequences;  // [rows] i32, the slots; not for a chunk
};

// Rotated queries and keys, and values. A chunk's keys have room for its halo before them.
struct Generator::Projected {
  TensorView q;             // [rows, H, d]
  TensorView k, v;          // [rows, G, d]
  TensorView all_k, all_v;  // [halo + rows, G, d]
};

Generator::Generator(Context context, Decoder& decoder, std::int64_t batch)
    : context_(context),
      decoder_(&decoder),
      weights_(context, decoder.config(), decoder.weights()),
      frequencies_(rope_frequencies(static_cast<int>(decoder.config().head_dim),
                                    decoder.config().rope_theta,
                                    decoder.config().rope_scaling)),
      scratch_(context.memory) {
  BIFOCAL_REQUIRE(batch > 0, "[generate] wanted room for a sequence, got a batch of {}", batch);
  for (const MixerSettings& mixer : decoder.config().mixers) {
    caches_.emplace_back(context, decoder.config(), mixer, batch);
  }
  positions_.assign(static_cast<std::size_t>(batch), 0);
}

void Generator::reset(std::int64_t slot) {
  for (LayerCache& cache : caches_) {
    cache.reset(slot);
  }
  positions_.at(static_cast<std::size_t>(slot)) = 0;
}

std::size_t Generator::cache_bytes() const {
  return std::accumulate(
      caches_.begin(), caches_.end(), std::size_t{0}, [](std::size_t sum, const LayerCache& cache) {
        return sum + cache.bytes();
      });
}

ConstTensorView Generator::in_compute_type(const ConstTensorView& weight) {
  if (weight.dtype == context_.dtype) {
    return weight;
  }
  const TensorView copy = take(Use::weight, weight.shape);
  run(context_.stream, Cast{.y = copy, .x = weight});
  return copy;
}

void Generator::linear(const Step& step,
                       const TensorView& y,
                       const ConstTensorView& x,
                       const ConstTensorView& weight,
                       const ConstTensorView& bias) {
  if (step.is_chunk && step.rows >= kLeastBlasRows) {
    run(context_.stream,
        LinearForward{.y = y, .x = x, .weight = in_compute_type(weight), .bias = bias});
  } else {
    run(context_.stream, DecodeLinear{.y = y, .x = x, .weight = weight, .bias = bias});
  }
}

void Generator::features(const Step& step,
                         const TensorView& y,
                         const ConstTensorView& x,
                         const ConstTensorView& weight) {
  if (step.is_chunk && step.rows >= kLeastBlasRows) {
    run(context_.stream, FeatureMapForward{.y = y, .x = x, .weight = in_compute_type(weight)});
  } else {
    run(context_.stream, DecodeFeatureMap{.y = y, .x = x, .weight = weight});
  }
}

void Generator::rms_norm(const TensorView& y,
                         const ConstTensorView& x,
                         const ConstTensorView& weight) {
  const Shape rows{x.size() / weight.size(), weight.size()};
  run(context_.stream,
      RmsNormForward{.y = y.reshape(rows),
                     .x = x.reshape(rows),
                     .weight = weight,
                     .eps = decoder_->config().norm_eps});
}

Generator::Projected Generator::project(std::int64_t index,
                                        const Step& step,
                                        const ConstTensorView& a) {
  const ModelConfig& config = decoder_->config();
  const LayerWeights& w = weights_.layer(index);
  const LayerCache& cache = caches_[static_cast<std::size_t>(index)];
  const std::int64_t halo = step.is_chunk ? cache.halo(tokens(step.slots[0])) : 0;
  const std::int64_t all = halo + step.rows;
  Projected p;
  p.q = take(Use::q, {step.rows, config.heads, config.head_dim});
  p.all_k = take(Use::k, {all, config.kv_heads, config.head_dim});
  p.all_v = take(Use::v, {all, config.kv_heads, config.head_dim});
  p.k = p.all_k.rows(halo, all);
  p.v = p.all_v.rows(halo, all);
  linear(step, p.q.reshape({step.rows, config.attention_width()}), a, w.q, w.q_bias);
  linear(step, p.k.reshape({step.rows, config.kv_width()}), a, w.k, w.k_bias);
  linear(step, p.v.reshape({step.rows, config.kv_width()}), a, w.v, w.v_bias);
  if (config.qk_norm) {
    rms_norm(p.q, p.q, w.q_norm);
    rms_norm(p.k, p.k, w.k_norm);
  }
  run(context_.stream, RopeRotate{.x = p.q, .cos = step.cos, .sin = step.sin});
  run(context_.stream, RopeRotate{.x = p.k, .cos = step.cos, .sin = step.sin});
  return p;
}

TensorView Generator::near(std::int64_t index, const Step& step, const Projected& p) {
  LayerCache& cache = caches_[static_cast<std::size_t>(index)];
  const MixerSettings& settings = cache.settings();
  const TensorView out = take(Use::near, p.q.shape);
  const ConstTensorView sink =
      settings.sink == Sink::learned ? weights_.layer(index).sink : ConstTensorView{};
  if (step.is_chunk) {
    const std::int64_t slot = step.slots[0];
    const std::int64_t position = tokens(slot);
    if (settings.is_full()) {
      cache.append(slot, position, p.k, p.v);
    }
    AttentionInputs inputs =
        cache.attention_inputs({slot, position, step.rows, p.all_k, p.all_v}, scratch_);
    inputs.q = p.q;
    inputs.sink = sink;
    run(context_.stream,
        SlidingAttentionForward{.out = out,
                                .lse = take(Use::lse, {step.rows, decoder_->config().heads}),
                                .inputs = inputs});
    if (!settings.is_full()) {
      cache.append(slot, position, p.k, p.v);
    }
    return out;
  }
  std::vector<ConstTensorView> keys;
  std::vector<ConstTensorView> values;
  for (std::int64_t row = 0; row < step.rows; ++row) {
    const std::int64_t slot = step.slots[static_cast<std::size_t>(row)];
    cache.append(slot, tokens(slot), p.k.rows(row, row + 1), p.v.rows(row, row + 1));
    keys.push_back(cache.keys(slot, tokens(slot) + 1));
    values.push_back(cache.values(slot, tokens(slot) + 1));
  }
  run(context_.stream, DecodeAttention{.out = out, .q = p.q, .k = keys, .v = values, .sink = sink});
  return out;
}

TensorView Generator::far(std::int64_t index,
                          const Step& step,
                          const ConstTensorView& a,
                          const Projected& p) {
  const LayerWeights& w = weights_.layer(index);
  const LayerCache& cache = caches_[static_cast<std::size_t>(index)];
  const std::int64_t states = cache.states().m.shape[1];
  const TensorView feature_q = take(Use::feature_q, p.q.shape);
  const TensorView feature_k =
      take(Use::feature_k, {step.rows, states, decoder_->config().head_dim});
  const TensorView i_gate = take(Use::i_gate, {step.rows, states});
  const TensorView f_gate = take(Use::f_gate, {step.rows, states});
  const TensorView h = take(Use::far, p.q.shape);
  features(step, feature_q, p.q, w.feature_q);
  features(step, feature_k, p.k, w.feature_k);
  linear(step, i_gate, a, w.i_gate);
  linear(step, f_gate, a, w.f_gate, w.f_gate_bias);
  if (step.is_chunk) {
    // One document, so it starts in this chunk or left a state.
    std::vector<std::uint8_t> starts(static_cast<std::size_t>(step.rows), 0);
    starts[0] = tokens(step.slots[0]) == 0 ? 1 : 0;
    const MlstmState state = cache.state(step.slots[0]);
    run(context_.stream,
        MlstmForward{.h = h,
                     .final = state,
                     .inputs = {.q = feature_q,
                                .k = feature_k,
                                .v = p.v,
                                .i_gate = i_gate,
                                .f_gate = f_gate,
                                .starts = {starts.data(), DType::u8, {step.rows}},
                                .initial = state}});
    return h;
  }
  const MlstmState all = cache.states();
  run(context_.stream,
      MlstmStep{.h = h,
                .c = all.c,
                .n = all.n,
                .m = all.m,
                .q = feature_q,
                .k = feature_k,
                .v = p.v,
                .i_gate = i_gate,
                .f_gate = f_gate,
                .sequences = step.sequences});
  return h;
}

TensorView Generator::mix(std::int64_t index, const Step& step, const ConstTensorView& a) {
  const LayerWeights& w = weights_.layer(index);
  const MixerSettings& settings = caches_[static_cast<std::size_t>(index)].settings();
  const Projected p = project(index, step, a);
  if (!settings.has_far()) {
    return near(index, step, p);
  }
  const TensorView far_heads = far(index, step, a, p);
  if (!settings.has_near()) {
    return far_heads;
  }
  const TensorView near_heads = near(index, step, p);
  if (!settings.has_gate()) {
    run(context_.stream, Add{.y = near_heads, .a = near_heads, .b = far_heads});
    return near_heads;
  }
  const TensorView gate = take(Use::o_gate, {step.rows, decoder_->config().heads});
  const TensorView mixed = take(Use::mixed, p.q.shape);
  linear(step, gate, a, w.o_gate, w.o_gate_bias);
  run(context_.stream,
      BifocalGateForward{.y = mixed, .far = far_heads, .near = near_heads, .gate = gate});
  return mixed;
}

void Generator::layer(std::int64_t index, const Step& step, const TensorView& x) {
  const ModelConfig& config = decoder_->config();
  const LayerWeights& w = weights_.layer(index);
  const TensorView normed = take(Use::normed, x.shape);
  const TensorView delta = take(Use::delta, x.shape);
  rms_norm(normed, x, w.input_norm);
  const TensorView heads = mix(index, step, normed);
  linear(step, delta, heads.reshape({step.rows, config.attention_width()}), w.o);
  run(context_.stream, Add{.y = x, .a = delta, .b = x});
  rms_norm(normed, x, w.post_norm);
  const TensorView gate = take(Use::gate, {step.rows, config.intermediate});
  const TensorView up = take(Use::up, {step.rows, config.intermediate});
  linear(step, gate, normed, w.mlp_gate);
  linear(step, up, normed, w.mlp_up);
  run(context_.stream, SwigluForward{.y = up, .gate = gate, .up = up});
  linear(step, delta, up, w.mlp_down);
  run(context_.stream, Add{.y = x, .a = delta, .b = x});
}

// Rows of a table in another type are converted one by one: the table is large, a chunk short.
void Generator::embed(const TensorView& x, std::span<const std::int32_t> ids) {
  const ConstTensorView& table = weights_.embedding();
  for (const std::int32_t id : ids) {
    BIFOCAL_REQUIRE(id >= 0 && id < table.shape[0],
                    "[generate] wanted ids from 0 to {}, got {}: the tokens belong to another "
                    "vocabulary",
                    table.shape[0] - 1,
                    id);
  }
  if (table.dtype == x.dtype) {
    const ConstTensorView tokens{ids.data(), DType::i32, {static_cast<std::int64_t>(ids.size())}};
    run(context_.stream, EmbeddingForward{.y = x, .ids = tokens, .table = table});
    return;
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i);
    run(context_.stream, Cast{.y = x.rows(row, row + 1), .x = table.rows(ids[i], ids[i] + 1)});
  }
}

ConstTensorView Generator::forward(Step& step, std::span<const std::int32_t> ids) {
  const ModelConfig& config = decoder_->config();
  const TensorView positions = scratch_.take(Use::positions, DType::i32, {step.rows});
  for (std::int64_t row = 0; row < step.rows; ++row) {
    const std::int64_t position = step.is_chunk ? tokens(step.slots[0]) + row
                                                : tokens(step.slots[static_cast<std::size_t>(row)]);
    positions.as<std::int32_t>()[row] = static_cast<std::int32_t>(position);
  }
  const Shape angles{step.rows, config.head_dim / 2};
  const TensorView cos = take(Use::cos, angles);
  const TensorView sin = take(Use::sin, angles);
  run(context_.stream,
      RopeTable{.cos = cos,
                .sin = sin,
                .positions = positions,
                .frequencies = {frequencies_.data(), DType::f64, {config.head_dim / 2}}});
  step.cos = cos;
  step.sin = sin;
  const TensorView x = take(Use::x, {step.rows, config.hidden});
  embed(x, ids);
  for (std::int64_t index = 0; index < config.layers; ++index) {
    layer(index, step, x);
  }
  if (!step.wants_logits) {
    return {};
  }
  const ConstTensorView last = step.is_chunk ? x.rows(step.rows - 1, step.rows) : x;
  const TensorView hidden = take(Use::hidden, last.shape);
  rms_norm(hidden, last, weights_.final_norm());
  const TensorView logits = take(Use::logits, {last.shape[0], config.vocabulary});
  run(context_.stream, DecodeLinear{.y = logits, .x = hidden, .weight = weights_.head()});
  return logits;
}

ConstTensorView Generator::prefill(std::int64_t slot,
                                   std::span<const std::int32_t> ids,
                                   std::int64_t chunk) {
  BIFOCAL_REQUIRE(!ids.empty(), "[generate] a prompt has no token: give each at least one");
  BIFOCAL_REQUIRE(chunk > 0, "[generate] wanted chunks of at least one token, got {}", chunk);
  ConstTensorView logits;
  const auto length = static_cast<std::int64_t>(ids.size());
  for (std::int64_t begin = 0; begin < length; begin += chunk) {
    const std::int64_t count = std::min(chunk, length - begin);
    Step step{.slots = {&slot, 1},
              .rows = count,
              .is_chunk = true,
              .wants_logits = begin + count == length};
    logits = forward(step,
                     ids.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count)));
    positions_.at(static_cast<std::size_t>(slot)) += count;
  }
  return logits;
}

ConstTensorView Generator::feed(std::span<const std::int64_t> slots,
                                std::span<const std::int32_t> ids) {
  BIFOCAL_ASSERT(!slots.empty() && slots.size() == ids.size());
  const std::vector<std::int32_t> sequences(slots.begin(), slots.end());
  const auto rows = static_cast<std::int64_t>(slots.size());
  Step step{.slots = slots, .rows = rows, .sequences = {sequences.data(), DType::i32, {rows}}};
  const ConstTensorView logits = forward(step, ids);
  for (const std::int64_t slot : slots) {
    ++positions_.at(static_cast<std::size_t>(slot));
  }
  return logits;
}

}  // namespace bifocal
