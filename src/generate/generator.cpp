// A generator's sequences, and prompts through the model in chunks.
#include "generate/generator.h"

#include <algorithm>
#include <numeric>

#include "ops/bifocal_gate.h"
#include "ops/decode_attention.h"
#include "ops/elementwise.h"
#include "ops/feature_map.h"
#include "ops/linear.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"
#include "ops/swiglu.h"
#include "ops/transfer.h"

namespace bifocal {

namespace {

// A chunk of fewer rows takes the decoding products: large ones gain nothing, and bf16 weights
// might have to be converted for them.
constexpr std::int64_t kLeastBlasRows = 16;

}  // namespace

struct Generator::Chunk {
  std::int64_t slot = 0;
  std::int64_t rows = 0;
  ConstTensorView cos, sin;  // [rows, head_dim / 2]
  ConstTensorView starts;    // [rows] u8
  std::map<WindowKind, ChunkPlan> plans;
};

// Rotated queries and keys, and values. Keys have room for their halo before them.
struct Generator::Projected {
  TensorView q;             // [rows, H, d]
  TensorView k, v;          // [rows, G, d]
  TensorView all_k, all_v;  // [halo + rows, G, d]
};

Generator::Generator(Context context, Decoder& decoder, std::int64_t batch)
    : context_(context),
      decoder_(&decoder),
      weights_(context, decoder.config(), decoder.weights()),
      scratch_(context.memory) {
  BIFOCAL_REQUIRE(batch > 0, "[generate] wanted room for a sequence, got a batch of {}", batch);
  const auto numbers = [&](DType type) {
    Tensor tensor = context.memory.empty(Region::cache, type, {batch});
    run(context_.stream, Zero{.x = tensor});
    return tensor;
  };
  const std::vector<double> frequencies = rope_frequencies(
      static_cast<int>(config().head_dim), config().rope_theta, config().rope_scaling);
  frequencies_ = context.memory.empty(Region::cache, DType::f64, {config().head_dim / 2});
  run(context_.stream,
      Upload{.y = frequencies_, .x = {frequencies.data(), DType::f64, frequencies_.shape()}});
  for (const MixerSettings& mixer : decoder.config().mixers) {
    caches_.emplace_back(context, decoder.config(), mixer, batch);
    if (mixer.has_near() && !places_.contains(kind_of(mixer))) {
      places_[kind_of(mixer)] = {numbers(DType::i32), numbers(DType::i32)};
    }
  }
  positions_.assign(static_cast<std::size_t>(batch), 0);
  for (Tensor* tensor :
       {&tokens_, &device_positions_, &row_ids_, &row_positions_, &row_sequences_}) {
    *tensor = numbers(DType::i32);
  }
  for (Tensor* tensor : {&streams_, &drawn_, &row_streams_, &row_indices_}) {
    *tensor = numbers(DType::i64);
  }
  state_ = {tokens_, device_positions_, streams_, drawn_};
}

void Generator::reset(std::int64_t slot) {
  for (LayerCache& cache : caches_) {
    cache.reset(slot);
    revision_ += cache.settings().is_full() ? 1 : 0;
  }
  positions_.at(static_cast<std::size_t>(slot)) = 0;
  run(context_.stream, Zero{.x = state_.position.rows(slot, slot + 1)});
}

std::size_t Generator::cache_bytes() const {
  return std::accumulate(
      caches_.begin(), caches_.end(), std::size_t{0}, [](std::size_t sum, const LayerCache& cache) {
        return sum + cache.bytes();
      });
}

void Generator::check_ids(std::span<const std::int32_t> ids) const {
  for (const std::int32_t id : ids) {
    BIFOCAL_REQUIRE(id >= 0 && id < config().vocabulary,
                    "[generate] wanted ids from 0 to {}, got {}: the tokens belong to another "
                    "vocabulary",
                    config().vocabulary - 1,
                    id);
  }
}

ConstTensorView Generator::in_compute_type(const ConstTensorView& weight) {
  if (weight.dtype == context_.dtype) {
    return weight;
  }
  const TensorView copy = take(Use::weight, weight.shape);
  run(context_.stream, Cast{.y = copy, .x = weight});
  return copy;
}

void Generator::linear(const TensorView& y,
                       const ConstTensorView& x,
                       const ConstTensorView& weight,
                       const ConstTensorView& bias) {
  if (x.shape[0] >= kLeastBlasRows) {
    run(context_.stream,
        LinearForward{.y = y, .x = x, .weight = in_compute_type(weight), .bias = bias});
    return;
  }
  const DecodeProduct product{.y = y, .weight = weight, .bias = bias};
  run(context_.stream, DecodeProducts{.products = {&product, 1}, .x = x});
}

void Generator::rms_norm(const TensorView& y,
                         const ConstTensorView& x,
                         const ConstTensorView& weight) {
  const Shape rows{x.size() / weight.size(), weight.size()};
  run(context_.stream,
      RmsNormForward{
          .y = y.reshape(rows), .x = x.reshape(rows), .weight = weight, .eps = config().norm_eps});
}

Generator::Projected Generator::project(std::int64_t index,
                                        const Chunk& chunk,
                                        const ConstTensorView& a) {
  const ModelConfig& model = config();
  const LayerWeights& w = weights_.layer(index);
  const MixerSettings& settings = caches_[static_cast<std::size_t>(index)].settings();
  const std::int64_t halo = settings.has_near() ? chunk.plans.at(kind_of(settings)).halo : 0;
  const std::int64_t all = halo + chunk.rows;
  Projected p;
  p.q = take(Use::q, {chunk.rows, model.heads, model.head_dim});
  p.all_k = take(Use::k, {all, model.kv_heads, model.head_dim});
  p.all_v = take(Use::v, {all, model.kv_heads, model.head_dim});
  p.k = p.all_k.rows(halo, all);
  p.v = p.all_v.rows(halo, all);
  linear(p.q.reshape({chunk.rows, model.attention_width()}), a, w.q, w.q_bias);
  linear(p.k.reshape({chunk.rows, model.kv_width()}), a, w.k, w.k_bias);
  linear(p.v.reshape({chunk.rows, model.kv_width()}), a, w.v, w.v_bias);
  if (model.qk_norm) {
    rms_norm(p.q, p.q, w.q_norm);
    rms_norm(p.k, p.k, w.k_norm);
  }
  run(context_.stream, RopeRotate{.x = p.q, .cos = chunk.cos, .sin = chunk.sin});
  run(context_.stream, RopeRotate{.x = p.k, .cos = chunk.cos, .sin = chunk.sin});
  return p;
}

TensorView Generator::near(std::int64_t index, const Chunk& chunk, const Projected& p) {
  LayerCache& cache = caches_[static_cast<std::size_t>(index)];
  const MixerSettings& settings = cache.settings();
  const ChunkPlan& plan = chunk.plans.at(kind_of(settings));
  const TensorView out = take(Use::near, p.q.shape);
  if (settings.is_full()) {
    cache.append(chunk.slot, plan, p.k, p.v);
  }
  AttentionInputs inputs = cache.attention_inputs(chunk.slot, plan, p.all_k, p.all_v, scratch_);
  inputs.q = p.q;
  inputs.sink = settings.sink == Sink::learned ? weights_.layer(index).sink : ConstTensorView{};
  run(context_.stream,
      SlidingAttentionForward{
          .out = out, .lse = take_sums(Use::lse, {chunk.rows, config().heads}), .inputs = inputs});
  if (!settings.is_full()) {
    cache.append(chunk.slot, plan, p.k, p.v);
  }
  return out;
}

TensorView Generator::far(std::int64_t index,
                          const Chunk& chunk,
                          const ConstTensorView& a,
                          const Projected& p) {
  const LayerWeights& w = weights_.layer(index);
  const MlstmState state = caches_[static_cast<std::size_t>(index)].state(chunk.slot);
  const std::int64_t states = state.m.shape[0];
  const TensorView feature_q = take(Use::feature_q, p.q.shape);
  const TensorView feature_k = take(Use::feature_k, {chunk.rows, states, config().head_dim});
  const TensorView i_gate = take_sums(Use::i_gate, {chunk.rows, states});
  const TensorView f_gate = take_sums(Use::f_gate, {chunk.rows, states});
  const TensorView h = take(Use::far, p.q.shape);
  const MlstmState final{take_sums(Use::state_c, state.c.shape),
                         take_sums(Use::state_n, state.n.shape),
                         take_sums(Use::state_m, state.m.shape)};
  run(context_.stream,
      FeatureMapForward{.y = feature_q, .x = p.q, .weight = in_compute_type(w.feature_q)});
  run(context_.stream,
      FeatureMapForward{.y = feature_k, .x = p.k, .weight = in_compute_type(w.feature_k)});
  linear(i_gate, a, w.i_gate);
  linear(f_gate, a, w.f_gate, w.f_gate_bias);
  run(context_.stream,
      MlstmForward{.h = h,
                   .final = final,
                   .inputs = {.q = feature_q,
                              .k = feature_k,
                              .v = p.v,
                              .i_gate = i_gate,
                              .f_gate = f_gate,
                              .starts = chunk.starts,
                              .initial = state}});
  run(context_.stream, Copy{.y = state.c, .x = final.c});
  run(context_.stream, Copy{.y = state.n, .x = final.n});
  run(context_.stream, Copy{.y = state.m, .x = final.m});
  return h;
}

TensorView Generator::mix(std::int64_t index, const Chunk& chunk, const ConstTensorView& a) {
  const LayerWeights& w = weights_.layer(index);
  const MixerSettings& settings = caches_[static_cast<std::size_t>(index)].settings();
  const Projected p = project(index, chunk, a);
  if (!settings.has_far()) {
    return near(index, chunk, p);
  }
  const TensorView far_heads = far(index, chunk, a, p);
  if (!settings.has_near()) {
    return far_heads;
  }
  const TensorView near_heads = near(index, chunk, p);
  if (!settings.has_gate()) {
    run(context_.stream, Add{.y = near_heads, .a = near_heads, .b = far_heads});
    return near_heads;
  }
  const TensorView gate = take(Use::o_gate, {chunk.rows, config().heads});
  const TensorView mixed = take(Use::mixed, p.q.shape);
  linear(gate, a, w.o_gate, w.o_gate_bias);
  run(context_.stream,
      BifocalGateForward{.y = mixed, .far = far_heads, .near = near_heads, .gate = gate});
  return mixed;
}

void Generator::chunk_layer(std::int64_t index, const Chunk& chunk, const TensorView& x) {
  const ModelConfig& model = config();
  const LayerWeights& w = weights_.layer(index);
  const TensorView normed = take(Use::normed, x.shape);
  const TensorView delta = take(Use::delta, x.shape);
  rms_norm(normed, x, w.input_norm);
  const TensorView heads = mix(index, chunk, normed);
  linear(delta, heads.reshape({chunk.rows, model.attention_width()}), w.o);
  run(context_.stream, Add{.y = x, .a = delta, .b = x});
  rms_norm(normed, x, w.post_norm);
  const TensorView gate = take(Use::gate, {chunk.rows, model.intermediate});
  const TensorView up = take(Use::up, {chunk.rows, model.intermediate});
  linear(gate, normed, w.mlp_gate);
  linear(up, normed, w.mlp_up);
  run(context_.stream, SwigluForward{.y = up, .gate = gate, .up = up});
  linear(delta, up, w.mlp_down);
  run(context_.stream, Add{.y = x, .a = delta, .b = x});
}

ConstTensorView Generator::read_chunk(std::int64_t slot,
                                      std::span<const std::int32_t> ids,
                                      bool wants_logits) {
  const ModelConfig& model = config();
  const auto rows = static_cast<std::int64_t>(ids.size());
  const std::int64_t position = tokens(slot);
  Chunk chunk{.slot = slot, .rows = rows};
  // One document, so it starts in this chunk or left a state.
  std::vector<std::uint8_t> starts(ids.size(), 0);
  starts[0] = position == 0 ? 1 : 0;
  std::vector<std::int32_t> positions(ids.size());
  std::iota(positions.begin(), positions.end(), static_cast<std::int32_t>(position));
  const auto upload = [&](Use use, DType type, const void* values) {
    const TensorView tensor = scratch_.take(use, type, {rows});
    run(context_.stream, Upload{.y = tensor, .x = {values, type, {rows}}});
    return tensor;
  };
  chunk.starts = upload(Use::starts, DType::u8, starts.data());
  const TensorView device_ids = upload(Use::ids, DType::i32, ids.data());
  const TensorView device_positions = upload(Use::positions, DType::i32, positions.data());
  for (const LayerCache& cache : caches_) {
    const WindowKind kind = kind_of(cache.settings());
    if (cache.settings().has_near() && !chunk.plans.contains(kind)) {
      chunk.plans[kind] = make_chunk_plan(context_, cache.settings(), position, rows);
    }
  }
  const Shape angles{rows, model.head_dim / 2};
  const TensorView cos = take_sums(Use::cos, angles);
  const TensorView sin = take_sums(Use::sin, angles);
  run(context_.stream,
      RopeTable{
          .cos = cos, .sin = sin, .positions = device_positions, .frequencies = frequencies_});
  chunk.cos = cos;
  chunk.sin = sin;
  const TensorView x = take(Use::x, {rows, model.hidden});
  run(context_.stream, DecodeEmbedding{.y = x, .ids = device_ids, .table = weights_.embedding()});
  for (std::int64_t index = 0; index < model.layers; ++index) {
    chunk_layer(index, chunk, x);
  }
  if (!wants_logits) {
    return {};
  }
  const TensorView logits = take_sums(Use::logits, {1, model.vocabulary});
  const DecodeProduct head{.y = logits, .weight = weights_.head()};
  run(context_.stream,
      DecodeProducts{.products = {&head, 1},
                     .x = x.rows(rows - 1, rows),
                     .norm = weights_.final_norm(),
                     .eps = model.norm_eps});
  return logits;
}

ConstTensorView Generator::prefill(std::int64_t slot,
                                   std::span<const std::int32_t> ids,
                                   std::int64_t chunk) {
  BIFOCAL_REQUIRE(!ids.empty(), "[generate] a prompt has no token: give each at least one");
  BIFOCAL_REQUIRE(chunk > 0, "[generate] wanted chunks of at least one token, got {}", chunk);
  check_ids(ids);
  ConstTensorView logits;
  const auto length = static_cast<std::int64_t>(ids.size());
  std::int64_t& position = positions_.at(static_cast<std::size_t>(slot));
  for (std::int64_t begin = 0; begin < length; begin += chunk) {
    const std::int64_t count = std::min(chunk, length - begin);
    logits =
        read_chunk(slot,
                   ids.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count)),
                   begin + count == length);
    position += count;
  }
  const auto reached = static_cast<std::int32_t>(position);
  run(context_.stream,
      Upload{.y = state_.position.rows(slot, slot + 1), .x = {&reached, DType::i32, {1}}});
  revision_ += 1;  // caches of full layers may have moved
  return logits;
}

ConstTensorView Generator::feed(std::span<const std::int64_t> slots,
                                std::span<const std::int32_t> ids) {
  BIFOCAL_ASSERT(!slots.empty() && slots.size() == ids.size());
  check_ids(ids);
  choose(slots);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    run(context_.stream,
        Upload{.y = state_.token.rows(slots[i], slots[i] + 1), .x = {&ids[i], DType::i32, {1}}});
  }
  const ConstTensorView logits = queue_step().logits;
  count_step();
  return logits;
}

}  // namespace bifocal
