// A decoder: embedding, blocks, final norm. Teacher and student are both decoders; they differ in
// mixers and in where their weights lie. Logits are the business of model/head.h.
#pragma once

#include <functional>
#include <vector>

#include "model/block.h"
#include "model/gradients.h"
#include "model/weights.h"

namespace bifocal {

// What a training forward pass keeps.
struct DecoderKept {
  Rope rope;
  ConstTensorView ids;  // [tokens] i32, as given to forward_kept()
  std::vector<BlockKept> blocks;
  Tensor last;  // [tokens, D] before the final norm
};

class Decoder {
 public:
  // weights must hold a ParameterTable of this config and outlive the decoder.
  Decoder(Context context, const ModelConfig& config, Weights& weights);

  const ModelConfig& config() const { return config_; }

  Weights& weights() const { return *weights_; }

  using Observer = std::function<void(std::int64_t layer, const Block::Observation&)>;

  // Final hidden states after the norm, [tokens, D]. ids: this shard's tokens. Collective over
  // layout.group() and, for sharded weights, over their group. Keeps nothing; observer may be
  // empty.
  Tensor forward(RowLayout& layout,
                 const ConstTensorView& ids,
                 const Observer& observer = {},
                 Block::Attention attention = Block::Attention::by_tokens);

  // The same, keeping what backward() needs. ids must outlive kept.
  Tensor forward_kept(RowLayout& layout,
                      const ConstTensorView& ids,
                      const RecomputePlan& recompute,
                      DecoderKept& kept);

  // d_hidden [tokens, D]: gradient of the hidden states after the norm, overwritten. Closes the
  // gradients of every unit; a tied head's gradient must already stand in the open embedding unit.
  // kept is emptied layer by layer.
  void backward(RowLayout& layout,
                DecoderKept& kept,
                const TensorView& d_hidden,
                Gradients& gradients);

 private:
  Tensor embed(const ConstTensorView& ids);
  Tensor final_norm(const ConstTensorView& x);
  ConstTensorView acquire_layer(std::int64_t layer, std::int64_t step);

  Context context_;
  ModelConfig config_;
  Weights* weights_;
  std::vector<Block> blocks_;
};

}  // namespace bifocal
