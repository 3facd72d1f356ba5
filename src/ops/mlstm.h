// The mLSTM read by softmax features (docs/bifocal_layer.md, "far branch"):
//   m_t = max(logsig(f_t) + m_{t-1}, i_t)
//   F = exp(logsig(f_t) + m_{t-1} - m_t),  I = exp(i_t - m_t)
//   C_t = F C_{t-1} + I k_t v_t^T,  n_t = F n_{t-1} + I k_t
//   h_t = q_t^T C_t / (q_t . n_t + 1e-30)
// with q, k the features. The state is empty (C = n = 0, m = -inf) at a document's first token.
// Query head h reads state h / (heads / states); state s holds value head s / (states / v_heads).
// Gate arithmetic (log decays, their prefix sums, m) is in double whatever the tensors' type. All
// tensors have one type, except that beside bfloat16 (GPUs) states, summaries and their gradients
// are float32, and gates with their gradients may be.
#pragma once

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

// -inf in m marks an empty state.
struct MlstmState {
  TensorView c;  // [states, head_dim, head_dim]: features x values
  TensorView n;  // [states, head_dim]
  TensorView m;  // [states]

  explicit operator bool() const { return static_cast<bool>(c); }
};

struct ConstMlstmState {
  ConstTensorView c, n, m;
  ConstMlstmState() = default;

  ConstMlstmState(const MlstmState& s)  // NOLINT(google-explicit-constructor): adds const
      : c(s.c), n(s.n), m(s.m) {}

  explicit operator bool() const { return static_cast<bool>(c); }
};

struct MlstmInputs {
  ConstTensorView q;               // [tokens, heads, head_dim] features
  ConstTensorView k;               // [tokens, states, head_dim] features
  ConstTensorView v;               // [tokens, v_heads, head_dim]
  ConstTensorView i_gate, f_gate;  // [tokens, states] pre-activations
  ConstTensorView starts;          // [tokens] u8: 1 at a document's first token
  ConstMlstmState initial;         // state before the first token; left out means empty
};

struct MlstmForward {
  TensorView h;      // [tokens, heads, head_dim]
  MlstmState final;  // state after the last token, optional
  MlstmInputs inputs;
  void check() const;
};

// All outputs are overwritten. m takes no gradient. The gradient of a state is that of (C, n) at
// the state's own scale exp(m). h is what the forward pass gives for the same inputs: some kernels
// read it, others find it anew.
struct MlstmBackward {
  TensorView d_q;                        // [tokens, heads, head_dim]
  TensorView d_k;                        // [tokens, states, head_dim]
  TensorView d_v;                        // [tokens, v_heads, head_dim]
  TensorView d_i_gate, d_f_gate;         // [tokens, states]
  TensorView d_initial_c, d_initial_n;   // optional, with inputs.initial
  ConstTensorView d_h;                   // [tokens, heads, head_dim]
  ConstTensorView h;                     // [tokens, heads, head_dim] from the forward pass
  ConstTensorView d_final_c, d_final_n;  // gradient of the final state, optional
  MlstmInputs inputs;
  void check() const;
};

// ---- sequence parallelism (bifocal_reference.py, summarise and combine) ----

// Numbers in one rank's packed summary: C, n, m and log decay g of every state, in that order.
inline std::int64_t mlstm_summary_size(std::int64_t states, std::int64_t head_dim) {
  return states * (head_dim * head_dim + head_dim + 2);
}

// Numbers in one rank's packed gradient summary: d_c, d_n and the decay factor of every state.
inline std::int64_t mlstm_gradient_summary_size(std::int64_t states, std::int64_t head_dim) {
  return states * (head_dim * head_dim + head_dim + 1);
}

// A shard as if nothing came before it. g is the sum of log decays, -inf where a document starts
// inside. A shard of no tokens gives (0, 0, -inf, 0). inputs.q and inputs.initial are not read.
struct MlstmSummarise {
  TensorView summary;  // [mlstm_summary_size]
  MlstmInputs inputs;
  void check() const;
};

// The state after the summaries of `count` neighbouring shards, folded left to right.
struct MlstmFold {
  MlstmState state;
  ConstTensorView summaries;  // [count, mlstm_summary_size]; count 0 gives the empty state
  void check() const;
};

// What a shard alone contributes to the gradient of its incoming state (d_c, d_n at the scale of
// inputs.initial.m) and the factor exp(m_in + g - m_out) by which the gradient of its outgoing
// state enters. m_out = max(m_in + g, m of the shard's summary); a factor of an empty state is 0.
struct MlstmGradientSummarise {
  TensorView summary;  // [mlstm_gradient_summary_size]
  ConstTensorView d_h, h;
  MlstmInputs inputs;  // with initial
  void check() const;
};

// The gradient of the state that leaves a shard, from the gradient summaries of all shards to its
// right: starting at the rightmost, d = local + factor * d.
struct MlstmGradientFold {
  TensorView d_c, d_n;
  ConstTensorView
      summaries;  // [count, mlstm_gradient_summary_size], left to right; count 0 gives 0
  void check() const;
};

// One token for each of some sequences, their states updated in place (generation). A row's result
// does not depend on the others. On CUDA it is a part of DecodeMixer (ops/decode_layer.h) alone.
struct MlstmStep {
  TensorView h;                    // [rows, heads, head_dim]
  TensorView c;                    // [sequences, states, head_dim, head_dim]
  TensorView n;                    // [sequences, states, head_dim]
  TensorView m;                    // [sequences, states]
  ConstTensorView q;               // [rows, heads, head_dim] features
  ConstTensorView k;               // [rows, states, head_dim] features
  ConstTensorView v;               // [rows, v_heads, head_dim]
  ConstTensorView i_gate, f_gate;  // [rows, states]
  ConstTensorView sequences;       // [rows] i32, distinct: whose states a row advances
  void check() const;
};

void run(CpuStream&, const MlstmForward&);
void run(CpuStream&, const MlstmBackward&);
void run(CpuStream&, const MlstmSummarise&);
void run(CpuStream&, const MlstmFold&);
void run(CpuStream&, const MlstmGradientSummarise&);
void run(CpuStream&, const MlstmGradientFold&);
void run(CpuStream&, const MlstmStep&);
void run(CudaStream&, const MlstmForward&);
void run(CudaStream&, const MlstmBackward&);
void run(CudaStream&, const MlstmSummarise&);
void run(CudaStream&, const MlstmFold&);
void run(CudaStream&, const MlstmGradientSummarise&);
void run(CudaStream&, const MlstmGradientFold&);

// The recurrence as plain loops, and its gradient from the quadratic form w_tj = decay * I: what
// the chunkwise training path is tested against.
void mlstm_definition(const MlstmForward& op);
void mlstm_definition(const MlstmBackward& op);

}  // namespace bifocal
