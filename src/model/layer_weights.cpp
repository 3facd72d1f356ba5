// From Hugging Face names to the fields of a layer.
#include "model/layer_weights.h"

#include <fmt/format.h>

namespace bifocal {

namespace {

template <class View>
View view_of(const Parameter& parameter, const View& flat) {
  return flat.rows(parameter.offset, parameter.offset + parameter.size()).reshape(parameter.shape);
}

template <class View>
LayerTensors<View> bind(const ParameterTable& table, std::int64_t layer, const View& flat) {
  const std::string prefix = fmt::format("model.layers.{}.", layer);
  const auto find = [&](const char* name) {
    return table.contains(prefix + name) ? view_of(table.at(prefix + name), flat) : View{};
  };
  LayerTensors<View> t;
  t.input_norm = find("input_layernorm.weight");
  t.post_norm = find("post_attention_layernorm.weight");
  t.q = find("self_attn.q_proj.weight");
  t.k = find("self_attn.k_proj.weight");
  t.v = find("self_attn.v_proj.weight");
  t.o = find("self_attn.o_proj.weight");
  t.q_bias = find("self_attn.q_proj.bias");
  t.k_bias = find("self_attn.k_proj.bias");
  t.v_bias = find("self_attn.v_proj.bias");
  t.q_norm = find("self_attn.q_norm.weight");
  t.k_norm = find("self_attn.k_norm.weight");
  t.sink = find("mixer.sink");
  t.feature_q = find("mixer.feature_q");
  t.feature_k = find("mixer.feature_k");
  t.i_gate = find("mixer.i_gate.weight");
  t.f_gate = find("mixer.f_gate.weight");
  t.f_gate_bias = find("mixer.f_gate.bias");
  t.o_gate = find("mixer.o_gate.weight");
  t.o_gate_bias = find("mixer.o_gate.bias");
  t.mlp_gate = find("mlp.gate_proj.weight");
  t.mlp_up = find("mlp.up_proj.weight");
  t.mlp_down = find("mlp.down_proj.weight");
  return t;
}

}  // namespace

LayerWeights layer_weights(const ParameterTable& table,
                           std::int64_t layer,
                           const ConstTensorView& flat) {
  return bind(table, layer, flat);
}

LayerGradients layer_gradients(const ParameterTable& table,
                               std::int64_t layer,
                               const TensorView& flat) {
  return bind(table, layer, flat);
}

ConstTensorView parameter_view(const Parameter& parameter, const ConstTensorView& flat) {
  return view_of(parameter, flat);
}

TensorView parameter_view(const Parameter& parameter, const TensorView& flat) {
  return view_of(parameter, flat);
}

}  // namespace bifocal
