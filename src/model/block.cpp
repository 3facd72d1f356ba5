// A transformer layer around its mixer.
#include "model/block.h"

#include "ops/elementwise.h"
#include "ops/fused_norm.h"
#include "ops/linear.h"
#include "ops/rms_norm.h"
#include "ops/swiglu.h"

namespace bifocal {

void Block::fill_mixer(const MixerInputs& in, BlockKept& kept) {
  if (!kept.normed) {
    kept.normed = activation(kept.input.shape());
    run(context_.stream,
        RmsNormForward{.y = kept.normed,
                       .x = kept.input,
                       .weight = in.weights.input_norm,
                       .eps = config_.norm_eps});
  }
  const MixerInputs normed{in.weights, in.layout, in.rope, kept.normed};
  if (kept.mixer) {
    mixer_.restore(normed, kept.mixer);
  } else {
    kept.mixer = mixer_.forward(normed, kept.incoming);
  }
}

void Block::fill_middle(const LayerWeights& w, BlockKept& kept) {
  if (kept.middle) {
    return;
  }
  const ConstTensorView heads = kept.mixer.heads();
  const Shape flat{heads.shape[0], config_.attention_width()};
  kept.middle = activation(kept.input.shape());
  kept.middle_normed = activation(kept.input.shape());
  run(context_.stream, LinearForward{.y = kept.middle, .x = heads.reshape(flat), .weight = w.o});
  run(context_.stream,
      AddRmsNorm{.y = kept.middle,
                 .z = kept.middle_normed,
                 .a = kept.middle,
                 .b = kept.input,
                 .weight = w.post_norm,
                 .eps = config_.norm_eps});
}

void Block::fill_mlp(const LayerWeights& w, BlockKept& kept) {
  const Shape wide{kept.middle.shape()[0], config_.intermediate};
  Stream& stream = context_.stream;
  if (!kept.middle_normed) {
    kept.middle_normed = activation(kept.middle.shape());
    run(stream,
        RmsNormForward{.y = kept.middle_normed,
                       .x = kept.middle,
                       .weight = w.post_norm,
                       .eps = config_.norm_eps});
  }
  if (!kept.gate) {
    kept.gate = activation(wide);
    kept.up = activation(wide);
    run(stream, LinearForward{.y = kept.gate, .x = kept.middle_normed, .weight = w.mlp_gate});
    run(stream, LinearForward{.y = kept.up, .x = kept.middle_normed, .weight = w.mlp_up});
  }
  if (!kept.act) {
    kept.act = activation(wide);
    run(stream, SwigluForward{.y = kept.act, .gate = kept.gate, .up = kept.up});
  }
}

Block::Observation Block::forward(const LayerWeights& weights,
                                  RowLayout& layout,
                                  const Rope& rope,
                                  Tensor& x,
                                  BlockKept& kept,
                                  Attention attention) {
  Stream& stream = context_.stream;
  kept.input = std::move(x);
  if (attention == Attention::ulysses) {
    kept.normed = activation(kept.input.shape());
    run(stream,
        RmsNormForward{.y = kept.normed,
                       .x = kept.input,
                       .weight = weights.input_norm,
                       .eps = config_.norm_eps});
    kept.mixer.mixed = mixer_.forward_ulysses({weights, layout, rope, kept.normed});
  } else {
    fill_mixer({weights, layout, rope, {}}, kept);
  }
  fill_middle(weights, kept);
  fill_mlp(weights, kept);
  x = activation(kept.input.shape());
  run(stream, LinearForward{.y = x, .x = kept.act, .weight = weights.mlp_down});
  run(stream, Add{.y = x, .a = x, .b = kept.middle});
  return {kept.input, kept.normed, kept.mixer.heads(), kept.mixer.far, kept.mixer.o_gate};
}

void Block::forget(BlockKept& kept, Recompute recompute) {
  if (recompute == Recompute::none) {
    return;
  }
  kept.normed = Tensor();
  kept.middle_normed = Tensor();
  kept.act = Tensor();
  if (recompute >= Recompute::mlp) {
    kept.gate = Tensor();
    kept.up = Tensor();
  }
  if (recompute >= Recompute::mixer) {
    kept.mixer = MixerKept();
  } else {
    mixer_.forget(kept.mixer);
  }
  if (recompute >= Recompute::block) {
    kept.middle = Tensor();
  }
}

void Block::mlp_backward(const LayerWeights& w,
                         const LayerGradients& g,
                         BlockKept& kept,
                         const TensorView& d_x) {
  Stream& stream = context_.stream;
  run(stream, LinearBackwardWeight{.d_weight = g.mlp_down, .d_y = d_x, .x = kept.act});
  // Gradients take the place of what they are the gradients of.
  const Tensor d_act = std::move(kept.act);
  run(stream, LinearBackwardInput{.d_x = d_act, .d_y = d_x, .weight = w.mlp_down});
  const Tensor d_gate = std::move(kept.gate);
  const Tensor d_up = std::move(kept.up);
  run(stream,
      SwigluBackward{.d_gate = d_gate, .d_up = d_up, .d_y = d_act, .gate = d_gate, .up = d_up});
  run(stream, LinearBackwardWeight{.d_weight = g.mlp_gate, .d_y = d_gate, .x = kept.middle_normed});
  run(stream, LinearBackwardWeight{.d_weight = g.mlp_up, .d_y = d_up, .x = kept.middle_normed});
  const Tensor d_normed = std::move(kept.middle_normed);
  run(stream, LinearBackwardInput{.d_x = d_normed, .d_y = d_gate, .weight = w.mlp_gate});
  run(stream,
      LinearBackwardInput{.d_x = d_normed, .d_y = d_up, .weight = w.mlp_up, .accumulate = true});
  run(stream,
      RmsNormBackward{.d_x = d_x,
                      .d_weight = g.post_norm,
                      .d_y = d_normed,
                      .x = kept.middle,
                      .weight = w.post_norm,
                      .eps = config_.norm_eps,
                      .accumulate = true});
  kept.middle = Tensor();
}

void Block::backward(const MixerInputs& in,
                     const LayerGradients& gradients,
                     BlockKept& kept,
                     const TensorView& d_x) {
  const LayerWeights& w = in.weights;
  Stream& stream = context_.stream;
  if (!kept.middle) {
    fill_mixer(in, kept);
    fill_middle(w, kept);
  }
  fill_mlp(w, kept);
  mlp_backward(w, gradients, kept, d_x);
  fill_mixer(in, kept);
  const ConstTensorView heads = kept.mixer.heads();
  const Shape flat{d_x.shape[0], config_.attention_width()};
  run(stream, LinearBackwardWeight{.d_weight = gradients.o, .d_y = d_x, .x = heads.reshape(flat)});
  Tensor d_heads = activation(heads.shape);
  run(stream, LinearBackwardInput{.d_x = d_heads.reshape(flat), .d_y = d_x, .weight = w.o});
  const Tensor d_normed = activation(kept.normed.shape());
  mixer_.backward({w, in.layout, in.rope, kept.normed},
                  kept.mixer,
                  kept.incoming,
                  std::move(d_heads),
                  {.gradients = gradients, .d_x = d_normed});
  kept.mixer = MixerKept();
  run(stream,
      RmsNormBackward{.d_x = d_x,
                      .d_weight = gradients.input_norm,
                      .d_y = d_normed,
                      .x = kept.input,
                      .weight = w.input_norm,
                      .eps = config_.norm_eps,
                      .accumulate = true});
}

}  // namespace bifocal
