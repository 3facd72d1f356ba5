// A transformer layer around its mixer.
#include "model/block.h"

#include "ops/elementwise.h"
#include "ops/linear.h"
#include "ops/rms_norm.h"
#include "ops/swiglu.h"

namespace bifocal {

void Block::mlp_forward(const LayerWeights& w, const Tensor& x, BlockKept& kept) {
  const std::int64_t tokens = x.shape()[0];
  kept.middle_normed = activation(x.shape());
  kept.gate = activation({tokens, config_.intermediate});
  kept.up = activation({tokens, config_.intermediate});
  kept.act = activation({tokens, config_.intermediate});
  Stream& stream = context_.stream;
  run(stream,
      RmsNormForward{
          .y = kept.middle_normed, .x = x, .weight = w.post_norm, .eps = config_.norm_eps});
  run(stream, LinearForward{.y = kept.gate, .x = kept.middle_normed, .weight = w.mlp_gate});
  run(stream, LinearForward{.y = kept.up, .x = kept.middle_normed, .weight = w.mlp_up});
  run(stream, SwigluForward{.y = kept.act, .gate = kept.gate, .up = kept.up});
}

Block::Observation Block::forward(const LayerWeights& weights,
                                  RowLayout& layout,
                                  const Rope& rope,
                                  Tensor& x,
                                  BlockKept& kept,
                                  Attention attention) {
  Stream& stream = context_.stream;
  const Shape shape = x.shape();
  kept.input = std::move(x);
  kept.normed = activation(shape);
  run(stream,
      RmsNormForward{.y = kept.normed,
                     .x = kept.input,
                     .weight = weights.input_norm,
                     .eps = config_.norm_eps});
  const MixerInputs in{weights, layout, rope, kept.normed};
  if (attention == Attention::ulysses) {
    kept.mixer.mixed = mixer_.forward_ulysses(in);
  } else {
    kept.mixer = mixer_.forward(in, kept.incoming);
  }
  const ConstTensorView heads = kept.mixer.heads();
  const Shape flat{shape[0], config_.attention_width()};
  kept.middle = activation(shape);
  run(stream, LinearForward{.y = kept.middle, .x = heads.reshape(flat), .weight = weights.o});
  run(stream, Add{.y = kept.middle, .a = kept.middle, .b = kept.input});
  mlp_forward(weights, kept.middle, kept);
  x = activation(shape);
  run(stream, LinearForward{.y = x, .x = kept.act, .weight = weights.mlp_down});
  run(stream, Add{.y = x, .a = x, .b = kept.middle});
  return {kept.input, kept.normed, heads};
}

void Block::forget(BlockKept& kept, Recompute recompute) {
  if (recompute == Recompute::none) {
    return;
  }
  BlockKept small;
  small.input = std::move(kept.input);
  small.incoming = std::move(kept.incoming);
  kept = std::move(small);
}

void Block::mlp_backward(const LayerWeights& w,
                         const LayerGradients& g,
                         const BlockKept& kept,
                         const TensorView& d_x) {
  Stream& stream = context_.stream;
  const Tensor d_gate = activation(kept.gate.shape());
  const Tensor d_up = activation(kept.up.shape());
  const Tensor d_normed = activation(kept.middle_normed.shape());
  run(stream, LinearBackwardWeight{.d_weight = g.mlp_down, .d_y = d_x, .x = kept.act});
  run(stream, LinearBackwardInput{.d_x = d_up, .d_y = d_x, .weight = w.mlp_down});
  run(stream,
      SwigluBackward{
          .d_gate = d_gate, .d_up = d_up, .d_y = d_up, .gate = kept.gate, .up = kept.up});
  run(stream, LinearBackwardWeight{.d_weight = g.mlp_gate, .d_y = d_gate, .x = kept.middle_normed});
  run(stream, LinearBackwardWeight{.d_weight = g.mlp_up, .d_y = d_up, .x = kept.middle_normed});
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
}

void Block::backward(const MixerInputs& in,
                     const LayerGradients& gradients,
                     BlockKept& kept,
                     const TensorView& d_x) {
  const LayerWeights& w = in.weights;
  Stream& stream = context_.stream;
  if (!kept.normed) {
    Tensor x = std::move(kept.input);
    forward(w, in.layout, in.rope, x, kept);
  }
  mlp_backward(w, gradients, kept, d_x);
  const ConstTensorView heads = kept.mixer.heads();
  const Shape flat{d_x.shape[0], config_.attention_width()};
  const Tensor d_heads = activation(heads.shape);
  const Tensor d_normed = activation(kept.normed.shape());
  run(stream, LinearBackwardWeight{.d_weight = gradients.o, .d_y = d_x, .x = heads.reshape(flat)});
  run(stream, LinearBackwardInput{.d_x = d_heads.reshape(flat), .d_y = d_x, .weight = w.o});
  mixer_.backward({w, in.layout, in.rope, kept.normed},
                  kept.mixer,
                  kept.incoming,
                  d_heads,
                  {.gradients = gradients, .d_x = d_normed});
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
