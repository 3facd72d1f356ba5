// The mixer's backward pass.
#include "model/mixer.h"
#include "ops/bifocal_gate.h"
#include "ops/elementwise.h"
#include "ops/feature_map.h"
#include "ops/linear.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"

namespace bifocal {

void Mixer::near_backward(Pass& pass, const ConstTensorView& d_near) {
  MixerKept& kept = pass.kept;
  SlidingAttentionBackward op{.d_out = d_near,
                              .out = kept.near,
                              .lse = kept.lse,
                              .inputs = attention_inputs(pass.in, kept)};
  if (settings_.sink == Sink::learned) {
    op.d_sink = pass.out.gradients.sink;
  }
  if (!pass.out.d_x && !pass.out.projections) {  // stage 1 with new tensors only: the sink's alone
    if (op.d_sink) {
      run(context_.stream, op);
    }
    return;
  }
  RowLayout& layout = pass.in.layout;
  const WindowPlan& plan = layout.window_plan(settings_.window, sink_tokens());
  const std::int64_t keys = kept.k.shape()[0];
  pass.d_q = activation(kept.q.shape());
  pass.d_keys = activation(kept.k.shape());
  pass.d_values = activation(kept.v.shape());
  pass.d_k = pass.d_keys.rows(plan.halo, keys);
  pass.d_v = pass.d_values.rows(plan.halo, keys);
  const Tensor d_pinned_k = activation(kept.pinned_k.shape());
  const Tensor d_pinned_v = activation(kept.pinned_v.shape());
  op.d_q = pass.d_q;
  op.d_k = pass.d_keys;
  op.d_v = pass.d_values;
  if (plan.pinned > 0) {
    op.d_pinned_k = d_pinned_k;
    op.d_pinned_v = d_pinned_v;
  }
  run(context_.stream, op);
  const auto give_back = [&](const Tensor& d_buffer,
                             const TensorView& d_own,
                             const Tensor& d_pinned) {
    return_window_gradients(context_, layout, plan, d_own, d_buffer.rows(0, plan.halo), d_pinned);
  };
  give_back(pass.d_keys, pass.d_k, d_pinned_k);
  give_back(pass.d_values, pass.d_v, d_pinned_v);
}

void Mixer::input_backward(Pass& pass, const ConstTensorView& d_y, const ConstTensorView& weight) {
  run(context_.stream,
      LinearBackwardInput{
          .d_x = pass.out.d_x, .d_y = d_y, .weight = weight, .accumulate = pass.has_d_x});
  pass.has_d_x = true;
}

void Mixer::gate_backward(Pass& pass, const GateGradient& gate) {
  Tensor rounded;
  ConstTensorView d_gate = gate.d_gate;
  if (d_gate.dtype != context_.dtype) {
    rounded = activation(d_gate.shape);
    run(context_.stream, Cast{.y = rounded, .x = d_gate});
    d_gate = rounded;
  }
  run(context_.stream,
      LinearBackwardWeight{
          .d_weight = gate.d_weight, .d_bias = gate.d_bias, .d_y = d_gate, .x = pass.in.x});
  if (pass.out.d_x) {
    input_backward(pass, d_gate, gate.weight);
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
      context_.memory.empty(Region::communication, context_.sum_type(), {group.size(), size});
  const TensorView own = summaries.rows(group.rank(), group.rank() + 1).reshape({size});
  run(context_.stream,
      MlstmGradientSummarise{.summary = own, .d_h = op.d_h, .h = op.h, .inputs = op.inputs});
  group.all_gather(summaries.reshape({group.size() * size}), own);
  d_c = sums({states(), dim, dim});
  d_n = sums({states(), dim});
  run(context_.stream,
      MlstmGradientFold{
          .d_c = d_c, .d_n = d_n, .summaries = summaries.rows(group.rank() + 1, group.size())});
}

void Mixer::far_backward(Pass& pass, Tensor d_far) {
  MixerKept& kept = pass.kept;
  const std::int64_t tokens = pass.in.layout.tokens();
  const Tensor d_feature_q = activation(kept.feature_q.shape());
  const Tensor d_feature_k = activation(kept.feature_k.shape());
  const Tensor d_i = sums({tokens, states()});
  const Tensor d_f = sums({tokens, states()});
  {
    Tensor d_v = activation({tokens, config_.kv_heads, config_.head_dim});
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
                     .inputs = mlstm_inputs(pass.in, kept, pass.incoming)};
    Tensor d_final_c;
    Tensor d_final_n;
    if (pass.in.layout.group().size() > 1) {
      fill_outgoing_gradient(pass.in.layout, op, d_final_c, d_final_n);
      op.d_final_c = d_final_c;
      op.d_final_n = d_final_n;
    }
    run(context_.stream, op);
    if (pass.d_v) {
      run(context_.stream, Add{.y = pass.d_v, .a = pass.d_v, .b = d_v});
    } else {
      pass.d_v = d_v;
      pass.d_values = std::move(d_v);
    }
  }
  d_far = Tensor();
  kept.far = Tensor();
  kept.v = Tensor();
  feature_backward(pass, d_feature_q, d_feature_k);
  const LayerWeights& w = pass.in.weights;
  const LayerGradients& g = pass.out.gradients;
  gate_backward(pass, {.d_gate = d_i, .weight = w.i_gate, .d_weight = g.i_gate, .d_bias = {}});
  gate_backward(pass,
                {.d_gate = d_f, .weight = w.f_gate, .d_weight = g.f_gate, .d_bias = g.f_gate_bias});
}

void Mixer::feature_backward(Pass& pass, const Tensor& d_feature_q, const Tensor& d_feature_k) {
  MixerKept& kept = pass.kept;
  const std::int64_t tokens = pass.in.layout.tokens();
  const std::int64_t keys = kept.k.shape()[0];
  if (!pass.d_q) {  // no near branch, or stage 1 did not ask for its gradient
    pass.d_q = context_.memory.zeros(Region::activations, context_.dtype, kept.q.shape());
    pass.d_keys = context_.memory.zeros(
        Region::activations, context_.dtype, {tokens, config_.kv_heads, config_.head_dim});
    pass.d_k = pass.d_keys;
  }
  run(context_.stream,
      FeatureMapBackward{.d_x = pass.d_q,
                         .d_weight = pass.out.gradients.feature_q,
                         .d_y = d_feature_q,
                         .y = kept.feature_q,
                         .x = kept.q,
                         .weight = pass.in.weights.feature_q});
  run(context_.stream,
      FeatureMapBackward{.d_x = pass.d_k,
                         .d_weight = pass.out.gradients.feature_k,
                         .d_y = d_feature_k,
                         .y = kept.feature_k,
                         .x = kept.k.rows(keys - tokens, keys),
                         .weight = pass.in.weights.feature_k});
}

void Mixer::project_backward(Pass& pass) {
  const std::int64_t dim = config_.head_dim;
  const LayerWeights& w = pass.in.weights;
  const LayerGradients& g = pass.out.gradients;
  const Rope& rope = pass.in.rope;
  Stream& stream = context_.stream;
  run(stream, RopeRotate{.x = pass.d_q, .cos = rope.cos, .sin = rope.sin, .inverse = true});
  run(stream, RopeRotate{.x = pass.d_k, .cos = rope.cos, .sin = rope.sin, .inverse = true});
  if (config_.qk_norm) {
    const auto norm = [&](const TensorView& d_x,
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
    norm(pass.d_q, pass.kept.q_projected, w.q_norm, g.q_norm);
    norm(pass.d_k, pass.kept.k_projected, w.k_norm, g.k_norm);
  }
  const auto linear = [&](const TensorView& d_y,
                          const ConstTensorView& weight,
                          const TensorView& d_weight,
                          const TensorView& d_bias) {
    const TensorView flat = d_y.reshape({pass.in.layout.tokens(), weight.shape[0]});
    if (pass.out.projections) {
      run(stream,
          LinearBackwardWeight{
              .d_weight = d_weight, .d_bias = d_bias, .d_y = flat, .x = pass.in.x});
    }
    if (pass.out.d_x) {
      input_backward(pass, flat, weight);
    }
  };
  linear(pass.d_q, w.q, g.q, g.q_bias);
  linear(pass.d_k, w.k, g.k, g.k_bias);
  linear(pass.d_v, w.v, g.v, g.v_bias);
}

void Mixer::backward(const MixerInputs& in,
                     MixerKept& kept,
                     const IncomingState& incoming,
                     Tensor d_heads,
                     const MixerOutputs& out) {
  Pass pass{.in = in, .kept = kept, .incoming = incoming, .out = out};
  kept.mixed = Tensor();
  Tensor d_near;
  Tensor d_far;
  if (settings_.has_gate()) {
    d_near = activation(d_heads.shape());
    d_far = std::move(d_heads);
    const Tensor d_gate = activation(kept.o_gate.shape());
    run(context_.stream,
        BifocalGateBackward{.d_far = d_far,
                            .d_near = d_near,
                            .d_gate = d_gate,
                            .d_y = d_far,
                            .far = kept.far,
                            .near = kept.near,
                            .gate = kept.o_gate});
    gate_backward(pass,
                  {.d_gate = d_gate,
                   .weight = in.weights.o_gate,
                   .d_weight = out.gradients.o_gate,
                   .d_bias = out.gradients.o_gate_bias});
  } else {
    d_far = std::move(d_heads);
  }
  if (settings_.has_near()) {
    near_backward(pass, d_near ? d_near : d_far);
    kept.near = Tensor();
    d_near = Tensor();
  }
  if (settings_.has_far()) {
    far_backward(pass, std::move(d_far));
  }
  if (out.projections || out.d_x) {
    project_backward(pass);
  }
}

}  // namespace bifocal
