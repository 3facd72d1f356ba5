// One token of a batch through the model.
#include "generate/generator.h"

#include <algorithm>
#include <limits>

#include "model/head.h"
#include "ops/bifocal_gate.h"
#include "ops/decode_attention.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/feature_map.h"
#include "ops/linear.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"
#include "ops/sample.h"
#include "ops/swiglu.h"

namespace bifocal {

namespace {

std::int64_t pinned_tokens(const MixerSettings& mixer) {
  return mixer.sink == Sink::tokens ? mixer.sink_tokens : 0;
}

}  // namespace

Generator::Generator(Context context, Decoder& decoder, std::int64_t batch, std::int64_t capacity)
    : context_(context), decoder_(&decoder), batch_(batch) {
  const ModelConfig& config = decoder.config();
  const auto cache = [&](const Shape& shape) {
    return context_.memory.empty(Region::cache, context_.dtype, shape);
  };
  for (const MixerSettings& mixer : config.mixers) {
    LayerCache layer_cache;
    if (mixer.has_near()) {
      layer_cache.slots = mixer.is_full() ? capacity : mixer.window + pinned_tokens(mixer);
      layer_cache.k = cache({batch, layer_cache.slots, config.kv_width()});
      layer_cache.v = cache({batch, layer_cache.slots, config.kv_width()});
    }
    if (mixer.has_far()) {
      const std::int64_t states = mixer.num_states(config.heads, config.kv_heads);
      layer_cache.c = cache({batch, states, config.head_dim, config.head_dim});
      layer_cache.n = cache({batch, states, config.head_dim});
      layer_cache.m = cache({batch, states});
    }
    caches_.push_back(std::move(layer_cache));
  }
  positions_ = context_.memory.zeros(Region::cache, DType::i32, {batch});
  active_ = context_.memory.zeros(Region::cache, DType::u8, {batch});
  hidden_ = context_.memory.zeros(Region::cache, context_.dtype, {batch, config.hidden});
  logits_ = context_.memory.empty(Region::cache, context_.dtype, {batch, config.vocabulary});
  reset();
}

void Generator::reset() {
  run(context_.stream, Zero{.x = positions_});
  for (LayerCache& cache : caches_) {
    if (!cache.c) {
      continue;
    }
    run(context_.stream, Zero{.x = cache.c});
    run(context_.stream, Zero{.x = cache.n});
    dispatch_real("generate", context_.dtype, [&]<class T>(T) {
      std::fill_n(cache.m.as<T>(), cache.m.size(), -std::numeric_limits<T>::infinity());
    });
  }
}

std::size_t Generator::cache_bytes() const {
  std::size_t bytes = 0;
  for (const LayerCache& cache : caches_) {
    for (const Tensor* tensor : {&cache.k, &cache.v, &cache.c, &cache.n, &cache.m}) {
      if (*tensor) {
        bytes += tensor->view().bytes();
      }
    }
  }
  return bytes;
}

// Pinned tokens fill the first slots and stay; the others go round a ring of `window` slots.
// Visible keys are then always slots [0, count).
void Generator::write_cache(LayerCache& cache,
                            const MixerSettings& mixer,
                            const Tensor& k,
                            const Tensor& v) {
  const Tensor slots = context_.memory.empty(Region::cache, DType::i32, {batch_});
  const std::int64_t pinned = pinned_tokens(mixer);
  for (std::int64_t b = 0; b < batch_; ++b) {
    const std::int64_t position = positions_.as<std::int32_t>()[b];
    std::int64_t slot = position;
    if (!mixer.is_full() && position >= pinned) {
      slot = pinned + (position - pinned) % mixer.window;
    }
    slots.as<std::int32_t>()[b] =
        active_.as<std::uint8_t>()[b] != 0 ? static_cast<std::int32_t>(slot) : -1;
  }
  const Shape rows{batch_, decoder_->config().kv_width()};
  run(context_.stream, CacheWrite{.cache = cache.k, .rows = k.reshape(rows), .slots = slots});
  run(context_.stream, CacheWrite{.cache = cache.v, .rows = v.reshape(rows), .slots = slots});
}

Tensor Generator::near(LayerCache& cache,
                       const MixerSettings& mixer,
                       const LayerWeights& weights,
                       const Tensor& q) {
  const Tensor counts = context_.memory.empty(Region::cache, DType::i32, {batch_});
  for (std::int64_t b = 0; b < batch_; ++b) {
    const std::int64_t fed = positions_.as<std::int32_t>()[b] + 1;
    const bool active = active_.as<std::uint8_t>()[b] != 0;
    counts.as<std::int32_t>()[b] =
        active ? static_cast<std::int32_t>(std::min(fed, cache.slots)) : 0;
  }
  Tensor out = activation(q.shape());
  DecodeAttention op{.out = out, .q = q, .k = cache.k, .v = cache.v, .counts = counts};
  if (mixer.sink == Sink::learned) {
    op.sink = weights.sink;
  }
  run(context_.stream, op);
  return out;
}

Tensor Generator::far(LayerCache& cache,
                      const LayerWeights& weights,
                      const Tensor& a,
                      const ConstTensorView& q,
                      const ConstTensorView& k,
                      const ConstTensorView& v) {
  const std::int64_t states = cache.m.shape()[1];
  const std::int64_t dim = decoder_->config().head_dim;
  const Tensor feature_q = activation(q.shape);
  const Tensor feature_k = activation({batch_, states, dim});
  const Tensor i_gate = activation({batch_, states});
  const Tensor f_gate = activation({batch_, states});
  Tensor h = activation(q.shape);
  Stream& stream = context_.stream;
  run(stream, FeatureMapForward{.y = feature_q, .x = q, .weight = weights.feature_q});
  run(stream, FeatureMapForward{.y = feature_k, .x = k, .weight = weights.feature_k});
  run(stream, LinearForward{.y = i_gate, .x = a, .weight = weights.i_gate});
  run(stream,
      LinearForward{.y = f_gate, .x = a, .weight = weights.f_gate, .bias = weights.f_gate_bias});
  run(stream,
      MlstmStep{.h = h,
                .c = cache.c,
                .n = cache.n,
                .m = cache.m,
                .q = feature_q,
                .k = feature_k,
                .v = v,
                .i_gate = i_gate,
                .f_gate = f_gate,
                .active = active_});
  return h;
}

Tensor Generator::mix(std::int64_t index,
                      const LayerWeights& w,
                      const Rope& rope,
                      const Tensor& a) {
  const ModelConfig& config = decoder_->config();
  const MixerSettings& mixer = config.mixers[static_cast<std::size_t>(index)];
  LayerCache& cache = caches_[static_cast<std::size_t>(index)];
  Stream& stream = context_.stream;
  const auto project = [&](std::int64_t heads,
                           const ConstTensorView& weight,
                           const ConstTensorView& bias,
                           const ConstTensorView& norm) {
    Tensor y = activation({batch_, heads, config.head_dim});
    run(stream,
        LinearForward{.y = y.reshape({batch_, heads * config.head_dim}),
                      .x = a,
                      .weight = weight,
                      .bias = bias});
    if (norm) {
      const TensorView rows = y.reshape({batch_ * heads, config.head_dim});
      run(stream, RmsNormForward{.y = rows, .x = rows, .weight = norm, .eps = config.norm_eps});
    }
    return y;
  };
  const Tensor q = project(config.heads, w.q, w.q_bias, w.q_norm);
  const Tensor k = project(config.kv_heads, w.k, w.k_bias, w.k_norm);
  const Tensor v = project(config.kv_heads, w.v, w.v_bias, {});
  run(stream, RopeRotate{.x = q, .cos = rope.cos, .sin = rope.sin});
  run(stream, RopeRotate{.x = k, .cos = rope.cos, .sin = rope.sin});
  Tensor near_heads;
  Tensor far_heads;
  if (mixer.has_near()) {
    write_cache(cache, mixer, k, v);
    near_heads = near(cache, mixer, w, q);
  }
  if (mixer.has_far()) {
    far_heads = far(cache, w, a, q, k, v);
  }
  if (!near_heads) {
    return far_heads;
  }
  if (!far_heads) {
    return near_heads;
  }
  if (!mixer.has_gate()) {
    run(stream, Add{.y = near_heads, .a = near_heads, .b = far_heads});
    return near_heads;
  }
  const Tensor gate = activation({batch_, config.heads});
  Tensor mixed = activation(q.shape());
  run(stream, LinearForward{.y = gate, .x = a, .weight = w.o_gate, .bias = w.o_gate_bias});
  run(stream, BifocalGateForward{.y = mixed, .far = far_heads, .near = near_heads, .gate = gate});
  return mixed;
}

void Generator::layer(std::int64_t index, const LayerWeights& w, const Rope& rope, Tensor& x) {
  const ModelConfig& config = decoder_->config();
  Stream& stream = context_.stream;
  const Tensor normed = activation(x.shape());
  run(stream, RmsNormForward{.y = normed, .x = x, .weight = w.input_norm, .eps = config.norm_eps});
  const Tensor heads = mix(index, w, rope, normed);
  const Tensor delta = activation(x.shape());
  run(stream,
      LinearForward{
          .y = delta, .x = heads.reshape({batch_, config.attention_width()}), .weight = w.o});
  run(stream, Add{.y = x, .a = delta, .b = x});
  run(stream, RmsNormForward{.y = normed, .x = x, .weight = w.post_norm, .eps = config.norm_eps});
  const Tensor gate = activation({batch_, config.intermediate});
  const Tensor up = activation({batch_, config.intermediate});
  run(stream, LinearForward{.y = gate, .x = normed, .weight = w.mlp_gate});
  run(stream, LinearForward{.y = up, .x = normed, .weight = w.mlp_up});
  run(stream, SwigluForward{.y = up, .gate = gate, .up = up});
  run(stream, LinearForward{.y = delta, .x = up, .weight = w.mlp_down});
  run(stream, Add{.y = x, .a = delta, .b = x});
}

void Generator::feed(const std::vector<std::int32_t>& ids,
                     const std::vector<std::uint8_t>& active) {
  BIFOCAL_ASSERT(static_cast<std::int64_t>(ids.size()) == batch_ && ids.size() == active.size());
  const ModelConfig& config = decoder_->config();
  Weights& weights = decoder_->weights();
  const ParameterTable& table = weights.table();
  std::copy(active.begin(), active.end(), active_.as<std::uint8_t>());

  Tensor x = activation({batch_, config.hidden});
  const ConstTensorView embedding = weights.acquire(table.embedding_unit(), table.layer_unit(0));
  run(context_.stream,
      EmbeddingForward{.y = x,
                       .ids = {ids.data(), DType::i32, {batch_}},
                       .table = parameter_view(table.at("model.embed_tokens.weight"), embedding)});
  weights.release(table.embedding_unit());
  const Rope rope = make_rope(context_, config, positions_);
  for (std::int64_t index = 0; index < config.layers; ++index) {
    const std::int64_t unit = table.layer_unit(index);
    layer(index, layer_weights(table, index, weights.acquire(unit, unit + 1)), rope, x);
    weights.release(unit);
  }
  const ConstTensorView last = weights.acquire(table.final_unit());
  run(context_.stream,
      RmsNormForward{.y = hidden_,
                     .x = x,
                     .weight = parameter_view(table.at("model.norm.weight"), last),
                     .eps = config.norm_eps});
  weights.release(table.final_unit());
  for (std::int64_t b = 0; b < batch_; ++b) {
    if (active[static_cast<std::size_t>(b)] != 0) {
      ++positions_.as<std::int32_t>()[b];
    }
  }
}

ConstTensorView Generator::logits() {
  Head(context_, decoder_->config(), decoder_->weights()).logits(hidden_, logits_);
  return logits_;
}

std::vector<GeneratedAnswer> generate(Context context,
                                      Generator& generator,
                                      const std::vector<std::vector<std::int32_t>>& prompts,
                                      std::int64_t first_stream,
                                      const GenerateOptions& options) {
  const auto batch = static_cast<std::size_t>(generator.batch());
  BIFOCAL_REQUIRE(prompts.size() <= batch,
                  "[generate] {} prompts do not fit a batch of {}",
                  prompts.size(),
                  batch);
  for (const auto& prompt : prompts) {
    BIFOCAL_REQUIRE(!prompt.empty(), "[generate] a prompt has no token: give each at least one");
  }
  generator.reset();
  std::vector<GeneratedAnswer> answers(prompts.size());
  std::vector<std::int32_t> ids(batch, 0);
  std::vector<std::uint8_t> active(batch, 0);
  std::vector<std::int64_t> streams(batch);
  for (std::size_t b = 0; b < batch; ++b) {
    streams[b] = first_stream + static_cast<std::int64_t>(b);
  }
  for (std::size_t b = 0; b < prompts.size(); ++b) {
    active[b] = options.max_new_tokens > 0 ? 1 : 0;
    ids[b] = prompts[b].front();
  }
  const std::int64_t rows = generator.batch();
  std::vector<std::int32_t> drawn(batch);
  for (std::size_t position = 0; std::count(active.begin(), active.end(), 1) > 0; ++position) {
    generator.feed(ids, active);
    bool draws = false;
    for (std::size_t b = 0; b < prompts.size(); ++b) {
      if (active[b] != 0) {
        draws = draws || position + 1 >= prompts[b].size();
      }
    }
    if (draws) {
      run(context.stream,
          Sample{.ids = {drawn.data(), DType::i32, {rows}},
                 .logits = generator.logits(),
                 .temperature = options.temperature,
                 .top_k = options.top_k,
                 .top_p = options.top_p,
                 .seed = options.seed,
                 .streams = {streams.data(), DType::i64, {rows}},
                 .index = position});
    }
    for (std::size_t b = 0; b < prompts.size(); ++b) {
      if (active[b] == 0) {
        continue;
      }
      if (position + 1 < prompts[b].size()) {
        ids[b] = prompts[b][position + 1];
        continue;
      }
      ids[b] = drawn[b];
      answers[b].ids.push_back(drawn[b]);
      const auto& stops = options.stop_ids;
      answers[b].stopped = std::find(stops.begin(), stops.end(), drawn[b]) != stops.end();
      const bool full = static_cast<std::int64_t>(answers[b].ids.size()) >= options.max_new_tokens;
      if (answers[b].stopped || full) {
        active[b] = 0;
      }
    }
  }
  return answers;
}

}  // namespace bifocal
