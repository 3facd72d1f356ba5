// The mixer's forward pass.
#include "model/mixer.h"

#include "ops/bifocal_gate.h"
#include "ops/elementwise.h"
#include "ops/feature_map.h"
#include "ops/fused_norm.h"
#include "ops/linear.h"
#include "ops/rope.h"
#include "ops/transfer.h"

namespace bifocal {

Rope make_rope(Context& context, const ModelConfig& config, const ConstTensorView& positions) {
  const std::vector<double> frequencies =
      rope_frequencies(static_cast<int>(config.head_dim), config.rope_theta, config.rope_scaling);
  const Shape shape{positions.shape[0], config.head_dim / 2};
  Rope rope{context.memory.empty(Region::activations, context.sum_type(), shape),
            context.memory.empty(Region::activations, context.sum_type(), shape)};
  const Tensor on_device =
      context.memory.empty(Region::activations, DType::f64, {config.head_dim / 2});
  run(context.stream,
      Upload{.y = on_device, .x = {frequencies.data(), DType::f64, on_device.shape()}});
  run(context.stream,
      RopeTable{
          .cos = rope.cos, .sin = rope.sin, .positions = positions, .frequencies = on_device});
  return rope;
}

void Mixer::project(const MixerInputs& in, std::int64_t halo, MixerKept& kept) {
  const std::int64_t tokens = in.layout.tokens();
  const std::int64_t heads = config_.heads;
  const std::int64_t kv_heads = config_.kv_heads;
  const std::int64_t dim = config_.head_dim;
  const LayerWeights& w = in.weights;
  kept.q = activation({tokens, heads, dim});
  kept.k = activation({halo + tokens, kv_heads, dim});
  kept.v = activation({halo + tokens, kv_heads, dim});
  const TensorView k_own = kept.k.rows(halo, halo + tokens);
  const TensorView v_own = kept.v.rows(halo, halo + tokens);
  TensorView q_projected = kept.q;
  TensorView k_projected = k_own;
  if (config_.qk_norm) {
    kept.q_projected = activation({tokens, heads, dim});
    kept.k_projected = activation({tokens, kv_heads, dim});
    q_projected = kept.q_projected;
    k_projected = kept.k_projected;
  }
  const Shape q_flat{tokens, heads * dim};
  const Shape k_flat{tokens, kv_heads * dim};
  Stream& stream = context_.stream;
  run(stream,
      LinearForward{.y = q_projected.reshape(q_flat), .x = in.x, .weight = w.q, .bias = w.q_bias});
  run(stream,
      LinearForward{.y = k_projected.reshape(k_flat), .x = in.x, .weight = w.k, .bias = w.k_bias});
  run(stream,
      LinearForward{.y = v_own.reshape(k_flat), .x = in.x, .weight = w.v, .bias = w.v_bias});
  rotate(in, halo, kept);
}

// q and k from their projections: head norms, where there are any, and rope.
void Mixer::rotate(const MixerInputs& in, std::int64_t halo, MixerKept& kept) {
  const auto turn =
      [&](const TensorView& x, const Tensor& projected, const ConstTensorView& weight) {
        if (config_.qk_norm) {
          run(context_.stream,
              NormRope{.y = x,
                       .x = projected,
                       .weight = weight,
                       .cos = in.rope.cos,
                       .sin = in.rope.sin,
                       .eps = config_.norm_eps});
        } else {
          run(context_.stream, RopeRotate{.x = x, .cos = in.rope.cos, .sin = in.rope.sin});
        }
      };
  turn(kept.q, kept.q_projected, in.weights.q_norm);
  turn(kept.k.rows(halo, halo + in.layout.tokens()), kept.k_projected, in.weights.k_norm);
}

AttentionInputs Mixer::attention_inputs(const MixerInputs& in, const MixerKept& kept) const {
  const WindowPlan& plan = in.layout.window_plan(settings_.window, sink_tokens());
  AttentionInputs inputs{.q = kept.q, .k = kept.k, .v = kept.v, .key_begin = plan.key_begin};
  if (settings_.sink == Sink::learned) {
    inputs.sink = in.weights.sink;
  }
  if (plan.pinned > 0) {
    inputs.pinned_k = kept.pinned_k;
    inputs.pinned_v = kept.pinned_v;
    inputs.pinned_begin = plan.pinned_begin;
    inputs.pinned_end = plan.pinned_end;
  }
  return inputs;
}

void Mixer::near_forward(const MixerInputs& in, MixerKept& kept) {
  const WindowPlan& plan = in.layout.window_plan(settings_.window, sink_tokens());
  const std::int64_t tokens = in.layout.tokens();
  const std::int64_t kv_heads = config_.kv_heads;
  const std::int64_t dim = config_.head_dim;
  kept.pinned_k = activation({plan.pinned, kv_heads, dim});
  kept.pinned_v = activation({plan.pinned, kv_heads, dim});
  exchange_window(in.layout,
                  plan,
                  kept.k.rows(plan.halo, plan.halo + tokens),
                  kept.k.rows(0, plan.halo),
                  kept.pinned_k);
  exchange_window(in.layout,
                  plan,
                  kept.v.rows(plan.halo, plan.halo + tokens),
                  kept.v.rows(0, plan.halo),
                  kept.pinned_v);
  kept.near = activation({tokens, config_.heads, dim});
  kept.lse = sums({tokens, config_.heads});
  run(context_.stream,
      SlidingAttentionForward{
          .out = kept.near, .lse = kept.lse, .inputs = attention_inputs(in, kept)});
}

MlstmInputs Mixer::mlstm_inputs(const MixerInputs& in,
                                const MixerKept& kept,
                                const IncomingState& incoming) const {
  const std::int64_t halo = kept.v.shape()[0] - in.layout.tokens();
  MlstmInputs inputs{.q = kept.feature_q,
                     .k = kept.feature_k,
                     .v = kept.v.rows(halo, halo + in.layout.tokens()),
                     .i_gate = kept.i_gate,
                     .f_gate = kept.f_gate,
                     .starts = in.layout.starts()};
  if (incoming) {
    inputs.initial = incoming.view();
  }
  return inputs;
}

void Mixer::fill_incoming(RowLayout& layout, const MlstmInputs& inputs, IncomingState& incoming) {
  Communicator& group = layout.group();
  const std::int64_t dim = config_.head_dim;
  const std::int64_t size = mlstm_summary_size(states(), dim);
  const Tensor summaries =
      context_.memory.empty(Region::communication, context_.sum_type(), {group.size(), size});
  const TensorView own = summaries.rows(group.rank(), group.rank() + 1).reshape({size});
  run(context_.stream, MlstmSummarise{.summary = own, .inputs = inputs});
  group.all_gather(summaries.reshape({group.size() * size}), own);
  incoming.c = sums({states(), dim, dim});
  incoming.n = sums({states(), dim});
  incoming.m = sums({states()});
  run(context_.stream,
      MlstmFold{.state = incoming.view(), .summaries = summaries.rows(0, group.rank())});
}

void Mixer::features(const MixerInputs& in, MixerKept& kept) {
  const std::int64_t tokens = in.layout.tokens();
  const std::int64_t dim = config_.head_dim;
  const std::int64_t halo = kept.k.shape()[0] - tokens;
  kept.feature_q = activation({tokens, config_.heads, dim});
  kept.feature_k = activation({tokens, states(), dim});
  run(context_.stream,
      FeatureMapForward{.y = kept.feature_q, .x = kept.q, .weight = in.weights.feature_q});
  run(context_.stream,
      FeatureMapForward{.y = kept.feature_k,
                        .x = kept.k.rows(halo, halo + tokens),
                        .weight = in.weights.feature_k});
}

void Mixer::far_forward(const MixerInputs& in, MixerKept& kept, IncomingState& incoming) {
  const std::int64_t tokens = in.layout.tokens();
  const std::int64_t dim = config_.head_dim;
  const LayerWeights& w = in.weights;
  Stream& stream = context_.stream;
  features(in, kept);
  kept.i_gate = sums({tokens, states()});
  kept.f_gate = sums({tokens, states()});
  run(stream, LinearForward{.y = kept.i_gate, .x = in.x, .weight = w.i_gate, .bias = {}});
  run(stream,
      LinearForward{.y = kept.f_gate, .x = in.x, .weight = w.f_gate, .bias = w.f_gate_bias});
  if (in.layout.group().size() > 1 && !incoming) {
    fill_incoming(in.layout, mlstm_inputs(in, kept, {}), incoming);
  }
  kept.far = activation({tokens, config_.heads, dim});
  run(stream, MlstmForward{.h = kept.far, .final = {}, .inputs = mlstm_inputs(in, kept, incoming)});
}

MixerKept Mixer::forward(const MixerInputs& in, IncomingState& incoming) {
  MixerKept kept;
  const std::int64_t halo =
      settings_.has_near() ? in.layout.window_plan(settings_.window, sink_tokens()).halo : 0;
  project(in, halo, kept);
  if (settings_.has_near()) {
    near_forward(in, kept);
  }
  if (settings_.has_far()) {
    far_forward(in, kept, incoming);
  }
  if (!settings_.has_near() || !settings_.has_far()) {
    return kept;
  }
  if (settings_.has_gate()) {
    kept.o_gate = activation({in.layout.tokens(), config_.heads});
    run(context_.stream,
        LinearForward{.y = kept.o_gate,
                      .x = in.x,
                      .weight = in.weights.o_gate,
                      .bias = in.weights.o_gate_bias});
  }
  mix(kept);
  return kept;
}

void Mixer::mix(MixerKept& kept) {
  kept.mixed = activation(kept.near.shape());
  if (settings_.has_gate()) {
    run(context_.stream,
        BifocalGateForward{
            .y = kept.mixed, .far = kept.far, .near = kept.near, .gate = kept.o_gate});
  } else {
    run(context_.stream, Add{.y = kept.mixed, .a = kept.near, .b = kept.far});
  }
}

void Mixer::forget(MixerKept& kept) {
  if (config_.qk_norm) {
    const std::int64_t halo = kept.k.shape()[0] - kept.k_projected.shape()[0];
    if (halo > 0) {
      kept.k_halo = activation({halo, config_.kv_heads, config_.head_dim});
      run(context_.stream, Copy{.y = kept.k_halo, .x = kept.k.rows(0, halo)});
    }
    kept.q = Tensor();
    kept.k = Tensor();
  }
  kept.feature_q = Tensor();
  kept.feature_k = Tensor();
  kept.mixed = Tensor();
}

void Mixer::restore(const MixerInputs& in, MixerKept& kept) {
  if (!kept.q) {
    const std::int64_t halo = kept.v.shape()[0] - in.layout.tokens();
    kept.q = activation(kept.q_projected.shape());
    kept.k = activation(kept.v.shape());
    if (halo > 0) {
      run(context_.stream, Copy{.y = kept.k.rows(0, halo), .x = kept.k_halo});
      kept.k_halo = Tensor();
    }
    rotate(in, halo, kept);
  }
  if (settings_.has_far() && !kept.feature_q) {
    features(in, kept);
  }
  if (settings_.has_near() && settings_.has_far() && !kept.mixed) {
    mix(kept);
  }
}

}  // namespace bifocal
