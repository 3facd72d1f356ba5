// One transformer layer, forward and backward:
//   a = norm(x), x += W_o mixer(a), b = norm(x), x += W_down(silu(W_gate b) * (W_up b)).
#pragma once

#include "model/mixer.h"
#include "plan/recompute.h"

namespace bifocal {

// What a layer keeps for its backward pass.
struct BlockKept {
  Tensor input;  // [tokens, D]
  IncomingState incoming;
  // Empty where they are computed again:
  Tensor normed;  // a
  MixerKept mixer;
  Tensor middle;         // x after the mixer
  Tensor middle_normed;  // b
  Tensor gate, up, act;  // [tokens, I]
};

class Block {
 public:
  Block(Context context, const ModelConfig& config, const MixerSettings& settings)
      : context_(context), config_(config), mixer_(context, config, settings) {}

  // What forward() hands to an observer: stage 1 reads the mixer's input and its heads, validation
  // its branches.
  struct Observation {
    ConstTensorView residual;  // [tokens, D], what the layer reads
    ConstTensorView input;     // [tokens, D]
    ConstTensorView heads;     // [tokens, H, d]
    ConstTensorView far;       // [tokens, H, d] before the gate; empty without a far branch
    ConstTensorView gate;      // [tokens, H] before the sigmoid; empty without a gate
  };

  enum class Attention : std::uint8_t { by_tokens, ulysses };

  // x [tokens, D] is replaced by the layer's output. Everything the backward pass needs is left in
  // kept.
  Observation forward(const LayerWeights& weights,
                      RowLayout& layout,
                      const Rope& rope,
                      Tensor& x,
                      BlockKept& kept,
                      Attention attention = Attention::by_tokens);

  // Frees what `recompute` says is not kept.
  void forget(BlockKept& kept, Recompute recompute);

  // d_x [tokens, D]: gradient of the output on entry, of the input on return. Adds to gradients.
  // Computes again what kept lacks, and empties kept on its way.
  void backward(const MixerInputs& in,
                const LayerGradients& gradients,
                BlockKept& kept,
                const TensorView& d_x);

 private:
  // Each fills what kept lacks of a part of the layer.
  void fill_mixer(const MixerInputs& in, BlockKept& kept);
  void fill_middle(const LayerWeights& weights, BlockKept& kept);
  void fill_mlp(const LayerWeights& weights, BlockKept& kept);
  void mlp_backward(const LayerWeights& weights,
                    const LayerGradients& gradients,
                    BlockKept& kept,
                    const TensorView& d_x);

  Tensor activation(const Shape& shape) {
    return context_.memory.empty(Region::activations, context_.dtype, shape);
  }

  Context context_;
  ModelConfig config_;
  Mixer mixer_;
};

}  // namespace bifocal
