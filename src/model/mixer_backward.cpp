// The mixer's backward pass.
#include "model/mixer.h"
#include "ops/bifocal_gate.h"
#include "ops/elementwise.h"
#include "ops/feature_map.h"
#include "ops/linear.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"

namespace bifocal {

void Mixer::near_backward(const MixerInputs& in,
                          const MixerKept& kept,
                          const ConstTensorView& d_near,
                          const Rotated& d,
                          const MixerOutputs& out) {
  SlidingAttentionBackward op{
      .d_out = d_near, .out = kept.near, .lse = kept.lse, .inputs = attention_inputs(in, kept)};
  if (settings_.sink == Sink::learned) {
    op.d_sink = out.gradients.sink;
  }
  if (!out.d_x && !out.projections) {  // stage 1 with new tensors only: the sink's gradient alone
    if (op.d_sink) {
      run(context_.stream, op);
    }
    return;
  }
  const WindowPlan& plan = in.layout.window_plan(settings_.window, sink_tokens());
  const std::int64_t tokens = in.layout.tokens();
  const Tensor d_k = activation(kept.k.shape());
  const Tensor d_v = activation(kept.v.shape());
  const Tensor d_pinned_k = activation(kept.pinned_k.shape());
  const Tensor d_pinned_v = activation(kept.pinned_v.shape());
  op.d_q = d.q;
  op.d_k = d_k;
  op.d_v = d_v;
  if (plan.pinned > 0) {
    op.d_pinned_k = d_pinned_k;
    op.d_pinned_v = d_pinned_v;
  }
  run(context_.stream, op);
  const auto own = [&](const Tensor& buffer) { return buffer.rows(plan.halo, plan.halo + tokens); };
  return_window_gradients(context_, in.layout, plan, own(d_k), d_k.rows(0, plan.halo), d_pinned_k);
  return_window_gradients(context_, in.layout, plan, own(d_v), d_v.rows(0, plan.halo), d_pinned_v);
  run(context_.stream, Cast{.y = d.k, .x = own(d_k)});
  run(context_.stream, Cast{.y = d.v, .x = own(d_v)});
}

void Mixer::gate_backward(const MixerInputs& in,
                          const GateGradient& gate,
                          const MixerOutputs& out) {
  run(context_.stream,
      LinearBackwardWeight{
          .d_weight = gate.d_weight, .d_bias = gate.d_bias, .d_y = gate.d_gate, .x = in.x});
  if (out.d_x) {
    run(context_.stream,
        LinearBackwardInput{
            .d_x = out.d_x, .d_y = gate.d_gate, .weight = gate.weight, .accumulate = true});
  }
}

void Mixer::fill_outgoing_gradient(RowLayout& layout,
                                   const MlstmBackward& op,
                                   Tensor& d_c,
                                   Tensor& d_n) {
  Communicator& group = layout.group();
  const std::int64_t dim = config_.head_dim;
  const std::int64_t size = mlstm_gradient_summary_size(states(), dim);
  const Tensor summaries =
      context_.memory.empty(Region::communication, context_.dtype, {group.size(), size});
  const TensorView own = summaries.rows(group.rank(), group.rank() + 1).reshape({size});
  run(context_.stream,
      MlstmGradientSummarise{.summary = own, .d_h = op.d_h, .h = op.h, .inputs = op.inputs});
  group.all_gather(summaries.reshape({group.size() * size}), own);
  d_c = activation({states(), dim, dim});
  d_n = activation({states(), dim});
  run(context_.stream,
      MlstmGradientFold{
          .d_c = d_c, .d_n = d_n, .summaries = summaries.rows(group.rank() + 1, group.size())});
}

void Mixer::far_backward(const MixerInputs& in,
                         const MixerKept& kept,
                         const IncomingState& incoming,
                         const ConstTensorView& d_far,
                         const Rotated& d,
                         const MixerOutputs& out) {
  const std::int64_t tokens = in.layout.tokens();
  const std::int64_t dim = config_.head_dim;
  const std::int64_t halo = kept.k.shape()[0] - tokens;
  const Tensor d_feature_q = activation({tokens, config_.heads, dim});
  const Tensor d_feature_k = activation({tokens, states(), dim});
  const Tensor d_v = activation({tokens, config_.kv_heads, dim});
  const Tensor d_i = activation({tokens, states()});
  const Tensor d_f = activation({tokens, states()});
  MlstmBackward op{.d_q = d_feature_q,
                   .d_k = d_feature_k,
                   .d_v = d_v,
                   .d_i_gate = d_i,
                   .d_f_gate = d_f,
                   .d_initial_c = {},
                   .d_initial_n = {},
                   .d_h = d_far,
                   .h = kept.far,
                   .d_final_c = {},
                   .d_final_n = {},
                   .inputs = mlstm_inputs(in, kept, incoming)};
  Tensor d_final_c;
  Tensor d_final_n;
  if (in.layout.group().size() > 1) {
    fill_outgoing_gradient(in.layout, op, d_final_c, d_final_n);
    op.d_final_c = d_final_c;
    op.d_final_n = d_final_n;
  }
  run(context_.stream, op);
  const LayerWeights& w = in.weights;
  const LayerGradients& g = out.gradients;
  run(context_.stream,
      FeatureMapBackward{.d_x = d.q,
                         .d_weight = g.feature_q,
                         .d_y = d_feature_q,
                         .y = kept.feature_q,
                         .x = kept.q,
                         .weight = w.feature_q});
  run(context_.stream,
      FeatureMapBackward{.d_x = d.k,
                         .d_weight = g.feature_k,
                         .d_y = d_feature_k,
                         .y = kept.feature_k,
                         .x = kept.k.rows(halo, halo + tokens),
                         .weight = w.feature_k});
  run(context_.stream, Add{.y = d.v, .a = d.v, .b = d_v});
  gate_backward(in, {.d_gate = d_i, .weight = w.i_gate, .d_weight = g.i_gate, .d_bias = {}}, out);
  gate_backward(
      in, {.d_gate = d_f, .weight = w.f_gate, .d_weight = g.f_gate, .d_bias = g.f_gate_bias}, out);
}

void Mixer::project_backward(const MixerInputs& in,
                             const MixerKept& kept,
                             const Rotated& d,
                             const MixerOutputs& out) {
  const std::int64_t tokens = in.layout.tokens();
  const std::int64_t dim = config_.head_dim;
  const LayerWeights& w = in.weights;
  const LayerGradients& g = out.gradients;
  Stream& stream = context_.stream;
  run(stream, RopeRotate{.x = d.q, .cos = in.rope.cos, .sin = in.rope.sin, .inverse = true});
  run(stream, RopeRotate{.x = d.k, .cos = in.rope.cos, .sin = in.rope.sin, .inverse = true});
  if (config_.qk_norm) {
    const auto norm = [&](const Tensor& d_x,
                          const Tensor& x,
                          const ConstTensorView& weight,
                          const TensorView& d_weight) {
      const Shape rows{d_x.size() / dim, dim};
      run(stream,
          RmsNormBackward{.d_x = d_x.reshape(rows),
                          .d_weight = d_weight,
                          .d_y = d_x.reshape(rows),
                          .x = x.reshape(rows),
                          .weight = weight,
                          .eps = config_.norm_eps});
    };
    norm(d.q, kept.q_projected, w.q_norm, g.q_norm);
    norm(d.k, kept.k_projected, w.k_norm, g.k_norm);
  }
  const auto linear = [&](const Tensor& d_y,
                          const ConstTensorView& weight,
                          const TensorView& d_weight,
                          const TensorView& d_bias) {
    const TensorView flat = d_y.reshape({tokens, weight.shape[0]});
    if (out.projections) {
      run(stream,
          LinearBackwardWeight{.d_weight = d_weight, .d_bias = d_bias, .d_y = flat, .x = in.x});
    }
    if (out.d_x) {
      run(stream,
          LinearBackwardInput{.d_x = out.d_x, .d_y = flat, .weight = weight, .accumulate = true});
    }
  };
  linear(d.q, w.q, g.q, g.q_bias);
  linear(d.k, w.k, g.k, g.k_bias);
  linear(d.v, w.v, g.v, g.v_bias);
}

void Mixer::backward(const MixerInputs& in,
                     const MixerKept& kept,
                     const IncomingState& incoming,
                     const ConstTensorView& d_heads,
                     const MixerOutputs& out) {
  const std::int64_t tokens = in.layout.tokens();
  const std::int64_t dim = config_.head_dim;
  const auto zeros = [&](std::int64_t heads) {
    return context_.memory.zeros(Region::activations, context_.dtype, {tokens, heads, dim});
  };
  const Rotated d{zeros(config_.heads), zeros(config_.kv_heads), zeros(config_.kv_heads)};
  if (out.d_x) {
    run(context_.stream, Zero{.x = out.d_x});
  }
  Tensor d_near_owned;
  Tensor d_far_owned;
  ConstTensorView d_near = d_heads;
  ConstTensorView d_far = d_heads;
  if (settings_.has_gate()) {
    d_near_owned = activation(d_heads.shape);
    d_far_owned = activation(d_heads.shape);
    const Tensor d_gate = activation({tokens, config_.heads});
    run(context_.stream,
        BifocalGateBackward{.d_far = d_far_owned,
                            .d_near = d_near_owned,
                            .d_gate = d_gate,
                            .d_y = d_heads,
                            .far = kept.far,
                            .near = kept.near,
                            .gate = kept.o_gate});
    d_near = d_near_owned;
    d_far = d_far_owned;
    gate_backward(in,
                  {.d_gate = d_gate,
                   .weight = in.weights.o_gate,
                   .d_weight = out.gradients.o_gate,
                   .d_bias = out.gradients.o_gate_bias},
                  out);
  }
  if (settings_.has_near()) {
    near_backward(in, kept, d_near, d, out);
  }
  if (settings_.has_far()) {
    far_backward(in, kept, incoming, d_far, d, out);
  }
  if (out.projections || out.d_x) {
    project_backward(in, kept, d, out);
  }
}

}  // namespace bifocal
