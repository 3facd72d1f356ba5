// The tensors of one layer as views into its unit's flat buffer: weights to read, gradients to add
// to.
#pragma once

#include "core/tensor.h"
#include "plan/parameter_table.h"

namespace bifocal {

// View is ConstTensorView for weights and TensorView for gradients. Absent tensors are empty views.
template <class View>
struct LayerTensors {
  View input_norm, post_norm;        // [D]
  View q, k, v, o;                   // [H*d, D], [G*d, D], [G*d, D], [D, H*d]
  View q_bias, k_bias, v_bias;       // [H*d], [G*d], [G*d]
  View q_norm, k_norm;               // [d]
  View sink;                         // [H]
  View feature_q, feature_k;         // [H, d, d], [S, d, d]
  View i_gate, f_gate, f_gate_bias;  // [S, D], [S, D], [S]
  View o_gate, o_gate_bias;          // [H, D], [H]
  View mlp_gate, mlp_up, mlp_down;   // [I, D], [I, D], [D, I]
};

using LayerWeights = LayerTensors<ConstTensorView>;
using LayerGradients = LayerTensors<TensorView>;

// Views of layer `layer` in the flat buffer of its unit.
LayerWeights layer_weights(const ParameterTable& table,
                           std::int64_t layer,
                           const ConstTensorView& flat);
LayerGradients layer_gradients(const ParameterTable& table,
                               std::int64_t layer,
                               const TensorView& flat);

// One parameter inside its unit's flat buffer.
ConstTensorView parameter_view(const Parameter& parameter, const ConstTensorView& flat);
TensorView parameter_view(const Parameter& parameter, const TensorView& flat);

}  // namespace bifocal
