// Embedding, blocks and final norm, with weights acquired unit by unit.
#include "model/decoder.h"

#include "ops/embedding.h"
#include "ops/rms_norm.h"

namespace bifocal {

Decoder::Decoder(Context context, const ModelConfig& config, Weights& weights)
    : context_(context), config_(config), weights_(&weights) {
  for (const MixerSettings& mixer : config.mixers) {
    blocks_.emplace_back(context, config, mixer);
  }
}

Tensor Decoder::embed(const ConstTensorView& ids) {
  const ParameterTable& table = weights_->table();
  const ConstTensorView flat = weights_->acquire(table.embedding_unit(), table.layer_unit(0));
  Tensor x =
      context_.memory.empty(Region::activations, context_.dtype, {ids.shape[0], config_.hidden});
  run(context_.stream,
      EmbeddingForward{.y = x,
                       .ids = ids,
                       .table = parameter_view(table.at("model.embed_tokens.weight"), flat)});
  weights_->release(table.embedding_unit());
  return x;
}

Tensor Decoder::final_norm(const ConstTensorView& x) {
  const ParameterTable& table = weights_->table();
  const ConstTensorView flat = weights_->acquire(table.final_unit());
  Tensor y = context_.memory.empty(Region::activations, context_.dtype, x.shape);
  run(context_.stream,
      RmsNormForward{.y = y,
                     .x = x,
                     .weight = parameter_view(table.at("model.norm.weight"), flat),
                     .eps = config_.norm_eps});
  weights_->release(table.final_unit());
  return y;
}

// step: +1 on the way up, -1 on the way down; says which unit is gathered meanwhile.
ConstTensorView Decoder::acquire_layer(std::int64_t layer, std::int64_t step) {
  const ParameterTable& table = weights_->table();
  const std::int64_t next = layer + step;
  std::int64_t next_unit = step > 0 ? table.final_unit() : table.embedding_unit();
  if (0 <= next && next < config_.layers) {
    next_unit = table.layer_unit(next);
  }
  if (step < 0 && next < 0) {
    next_unit = -1;  // the embedding's weights are not needed backwards
  }
  return weights_->acquire(table.layer_unit(layer), next_unit);
}

Tensor Decoder::forward(RowLayout& layout,
                        const ConstTensorView& ids,
                        const Observer& observer,
                        Block::Attention attention) {
  Tensor x = embed(ids);
  const Rope rope = make_rope(context_, config_, layout.positions());
  for (std::int64_t layer = 0; layer < config_.layers; ++layer) {
    const LayerWeights weights = layer_weights(weights_->table(), layer, acquire_layer(layer, 1));
    BlockKept kept;
    Block& block = blocks_[static_cast<std::size_t>(layer)];
    const Block::Observation seen = block.forward(weights, layout, rope, x, kept, attention);
    if (observer) {
      observer(layer, seen);
    }
    weights_->release(weights_->table().layer_unit(layer));
  }
  return final_norm(x);
}

Tensor Decoder::forward_kept(RowLayout& layout,
                             const ConstTensorView& ids,
                             const RecomputePlan& recompute,
                             DecoderKept& kept) {
  kept.ids = ids;
  kept.rope = make_rope(context_, config_, layout.positions());
  kept.blocks = std::vector<BlockKept>(static_cast<std::size_t>(config_.layers));
  Tensor x = embed(ids);
  for (std::int64_t layer = 0; layer < config_.layers; ++layer) {
    const LayerWeights weights = layer_weights(weights_->table(), layer, acquire_layer(layer, 1));
    BlockKept& block_kept = kept.blocks[static_cast<std::size_t>(layer)];
    Block& block = blocks_[static_cast<std::size_t>(layer)];
    block.forward(weights, layout, kept.rope, x, block_kept);
    block.forget(block_kept, recompute.of_layer(layer, config_.layers));
    weights_->release(weights_->table().layer_unit(layer));
  }
  kept.last = std::move(x);
  return final_norm(kept.last);
}

void Decoder::backward(RowLayout& layout,
                       DecoderKept& kept,
                       const TensorView& d_hidden,
                       Gradients& gradients) {
  const ParameterTable& table = weights_->table();
  const std::int64_t final_unit = table.final_unit();
  {
    const Parameter& norm = table.at("model.norm.weight");
    const ConstTensorView flat =
        weights_->acquire(final_unit, table.layer_unit(config_.layers - 1));
    run(context_.stream,
        RmsNormBackward{.d_x = d_hidden,
                        .d_weight = parameter_view(norm, gradients.open(final_unit)),
                        .d_y = d_hidden,
                        .x = kept.last,
                        .weight = parameter_view(norm, flat),
                        .eps = config_.norm_eps});
    weights_->release(final_unit);
    gradients.close(final_unit);
    kept.last = Tensor();
  }
  for (std::int64_t layer = config_.layers - 1; layer >= 0; --layer) {
    const std::int64_t unit = table.layer_unit(layer);
    const LayerWeights weights = layer_weights(table, layer, acquire_layer(layer, -1));
    const LayerGradients layer_sums = layer_gradients(table, layer, gradients.open(unit));
    BlockKept& block_kept = kept.blocks[static_cast<std::size_t>(layer)];
    blocks_[static_cast<std::size_t>(layer)].backward(
        {weights, layout, kept.rope, {}}, layer_sums, block_kept, d_hidden);
    block_kept = BlockKept();
    weights_->release(unit);
    gradients.close(unit);
  }
  const std::int64_t unit = table.embedding_unit();
  run(context_.stream,
      EmbeddingBackward{
          .d_table = parameter_view(table.at("model.embed_tokens.weight"), gradients.open(unit)),
          .d_y = d_hidden,
          .ids = kept.ids});
  gradients.close(unit);
  gradients.finish();
}

}  // namespace bifocal
