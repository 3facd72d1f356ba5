// Views of whole units.
#include "generate/resident_weights.h"

#include "ops/elementwise.h"

namespace bifocal {

ResidentWeights::ResidentWeights(Context context,
                                 const ModelConfig& config,
                                 const Weights& weights) {
  BIFOCAL_REQUIRE(weights.is_whole(),
                  "[generate] wanted a model that lies whole on this rank, got one sharded over {} "
                  "ranks: replicate its weights",
                  weights.group().size());
  const ParameterTable& table = weights.table();
  const auto find = [&](const char* name) {
    const Parameter& parameter = table.at(name);
    return parameter_view(parameter, ConstTensorView(weights.whole(parameter.unit)));
  };
  embedding_ = find("model.embed_tokens.weight");
  head_ = config.tied ? embedding_ : find("lm_head.weight");
  final_norm_ = find("model.norm.weight");
  to_compute_type(context, final_norm_);
  for (std::int64_t index = 0; index < config.layers; ++index) {
    const std::int64_t unit = table.layer_unit(index);
    LayerWeights w = layer_weights(table, index, ConstTensorView(weights.whole(unit)));
    for (ConstTensorView* vector : {&w.input_norm,
                                    &w.post_norm,
                                    &w.q_bias,
                                    &w.k_bias,
                                    &w.v_bias,
                                    &w.q_norm,
                                    &w.k_norm,
                                    &w.sink,
                                    &w.f_gate_bias,
                                    &w.o_gate_bias}) {
      to_compute_type(context, *vector);
    }
    layers_.push_back(w);
  }
}

void ResidentWeights::to_compute_type(Context& context, ConstTensorView& vector) {
  if (!vector || vector.dtype == context.dtype) {
    return;
  }
  Tensor copy = context.memory.empty(Region::weights, context.dtype, vector.shape);
  run(context.stream, Cast{.y = copy, .x = vector});
  vector = copy;
  copies_.push_back(std::move(copy));
}

}  // namespace bifocal
