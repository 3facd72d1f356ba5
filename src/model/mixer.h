// The token mixer of one layer, forward and backward: projections, near branch, far branch, gate
// (docs/bifocal_layer.md). It stops at the mixed heads; the output projection belongs to the block.
#pragma once

#include "config/model_config.h"
#include "model/context.h"
#include "model/layer_weights.h"
#include "model/row_layout.h"
#include "ops/mlstm.h"
#include "ops/sliding_attention.h"

namespace bifocal {

// cos and sin of tokens' positions.
struct Rope {
  Tensor cos, sin;  // [tokens, head_dim / 2]
};

// positions: [tokens] i32.
Rope make_rope(Context& context, const ModelConfig& config, const ConstTensorView& positions);

// The mLSTM state that enters a shard from the left; kept even where the rest is recomputed, so
// that a recomputed forward pass repeats no gather.
struct IncomingState {
  Tensor c, n, m;

  explicit operator bool() const { return static_cast<bool>(c); }

  MlstmState view() const { return {c, n, m}; }
};

// What the backward pass reads. Tensors that the settings do not use stay empty, and those that
// forget() freed are empty until restore().
struct MixerKept {
  Tensor q_projected, k_projected;  // before the per-head norms: [tokens, H, d], [tokens, G, d]
  Tensor q;                         // [tokens, H, d]
  Tensor k, v;                      // [halo + tokens, G, d]
  Tensor pinned_k, pinned_v;        // [pinned, G, d]
  Tensor near, lse;                 // [tokens, H, d], [tokens, H]
  Tensor feature_q, feature_k;      // [tokens, H, d], [tokens, S, d]
  Tensor i_gate, f_gate;            // [tokens, S]
  Tensor far;                       // [tokens, H, d]
  Tensor o_gate;                    // [tokens, H]
  Tensor mixed;                     // [tokens, H, d] where both branches are mixed
  Tensor k_halo;                    // [halo, G, d], while k is forgotten

  // The mixed heads [tokens, H, d].
  ConstTensorView heads() const { return mixed ? mixed : (near ? near : far); }

  explicit operator bool() const { return static_cast<bool>(v); }
};

// Where the backward pass writes, and what the caller wants besides the gradients of the new
// tensors (sink, features, gates).
struct MixerOutputs {
  const LayerGradients& gradients;  // added to
  TensorView d_x;                   // [tokens, D], overwritten; left out: not wanted
  bool projections = true;          // q, k, v with norms and biases
};

// What both passes read.
struct MixerInputs {
  const LayerWeights& weights;
  RowLayout& layout;
  const Rope& rope;
  ConstTensorView x;  // [tokens, D], the normalised input
};

class Mixer {
 public:
  Mixer(Context context, const ModelConfig& config, const MixerSettings& settings)
      : context_(context), config_(config), settings_(settings) {}

  // Collective over layout.group(). incoming is filled where the far branch crosses ranks and it is
  // still empty, and read otherwise.
  MixerKept forward(const MixerInputs& in, IncomingState& incoming);

  // Full attention with the heads cut over the group instead of the tokens: an exchange to
  // head-parallel and back. The group's size must divide kv_heads. Forward only. Returns the heads
  // [tokens, H, d].
  Tensor forward_ulysses(const MixerInputs& in);

  // Frees what restore() computes again without a product over the model's width and without
  // communication: q and k where the model has head norms, features, mixed heads.
  void forget(MixerKept& kept);
  void restore(const MixerInputs& in, MixerKept& kept);

  // d_heads [tokens, H, d], freed as soon as it is read; adds to the gradients; overwrites out.d_x
  // where it is wanted. Empties kept on its way.
  void backward(const MixerInputs& in,
                MixerKept& kept,
                const IncomingState& incoming,
                Tensor d_heads,
                const MixerOutputs& out);

 private:
  // What the parts of a backward pass share.
  struct Pass {
    const MixerInputs& in;
    MixerKept& kept;
    const IncomingState& incoming;
    const MixerOutputs& out;
    bool has_d_x = false;  // whether out.d_x holds a first contribution
    // Gradients of the rotated queries [tokens, H, d], and of keys and values with the halo in
    // front [halo + tokens, G, d]; d_k and d_v are this shard's rows.
    Tensor d_q, d_keys, d_values;
    TensorView d_k, d_v;
  };

  void project(const MixerInputs& in, std::int64_t halo, MixerKept& kept);
  void rotate(const MixerInputs& in, std::int64_t halo, MixerKept& kept);
  void features(const MixerInputs& in, MixerKept& kept);
  void mix(MixerKept& kept);
  void project_backward(Pass& pass);
  void near_forward(const MixerInputs& in, MixerKept& kept);
  void far_forward(const MixerInputs& in, MixerKept& kept, IncomingState& incoming);
  void fill_incoming(RowLayout& layout, const MlstmInputs& inputs, IncomingState& incoming);
  void near_backward(Pass& pass, const ConstTensorView& d_near);
  void far_backward(Pass& pass, Tensor d_far);
  void feature_backward(Pass& pass, const Tensor& d_feature_q, const Tensor& d_feature_k);
  // The gradient of the state that leaves this shard, from the ranks to its right.
  void fill_outgoing_gradient(RowLayout& layout, const MlstmBackward& op, Tensor& d_c, Tensor& d_n);

  // gate = x weight^T + bias, backwards.
  struct GateGradient {
    ConstTensorView d_gate, weight;
    TensorView d_weight, d_bias;
  };

  void gate_backward(Pass& pass, const GateGradient& gate);
  // out.d_x (=, then +=) d_y weight.
  void input_backward(Pass& pass, const ConstTensorView& d_y, const ConstTensorView& weight);
  AttentionInputs attention_inputs(const MixerInputs& in, const MixerKept& kept) const;
  MlstmInputs mlstm_inputs(const MixerInputs& in,
                           const MixerKept& kept,
                           const IncomingState& incoming) const;

  Tensor activation(const Shape& shape) {
    return context_.memory.empty(Region::activations, context_.dtype, shape);
  }

  // What must not be rounded to the compute type.
  Tensor sums(const Shape& shape) {
    return context_.memory.empty(Region::activations, context_.sum_type(), shape);
  }

  std::int64_t states() const { return settings_.num_states(config_.heads, config_.kv_heads); }

  std::int64_t sink_tokens() const {
    return settings_.sink == Sink::tokens ? settings_.sink_tokens : 0;
  }

  Context context_;
  ModelConfig config_;
  MixerSettings settings_;
};

}  // namespace bifocal
