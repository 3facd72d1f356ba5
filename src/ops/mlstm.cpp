// Argument checks of the mLSTM's ops.
#include "ops/mlstm.h"

#include "ops/mlstm_gates.h"

namespace bifocal {

namespace {

void check_counts(const char* where, const MlstmSizes& s) {
  BIFOCAL_REQUIRE(s.states > 0 && s.v_heads > 0 && s.head_dim > 0 && s.heads > 0 &&
                      s.heads % s.states == 0 && s.states % s.v_heads == 0,
                  "[{}] wanted query heads in whole groups per state and states in whole groups "
                  "per value head, got {} query heads, {} states, {} value heads of width {}: "
                  "use one state per key-value head or per query head",
                  where,
                  s.heads,
                  s.states,
                  s.v_heads,
                  s.head_dim);
}

// States accumulate over a document, so no type narrower than float32 holds them.
DType state_type(DType dtype) {
  return dtype == DType::bf16 ? DType::f32 : dtype;
}

// The type of i_gate's tensors: k's, or float32 beside bfloat16.
DType gate_type(const ConstTensorView& i_gate, DType dtype) {
  return dtype == DType::bf16 && i_gate.dtype == DType::f32 ? DType::f32 : dtype;
}

void check_state(const char* where,
                 const ConstMlstmState& state,
                 DType dtype,
                 std::int64_t states,
                 std::int64_t head_dim) {
  require_tensor(where, "state c", state.c, dtype, {states, head_dim, head_dim});
  require_tensor(where, "state n", state.n, dtype, {states, head_dim});
  require_tensor(where, "state m", state.m, dtype, {states});
}

// All but q.
MlstmSizes check_inputs(const char* where, const MlstmInputs& in) {
  const MlstmSizes s = mlstm_sizes(in);
  const DType dtype = in.k.dtype;
  check_counts(where, s);
  require_tensor(where, "k", in.k, dtype, {s.tokens, s.states, s.head_dim});
  require_tensor(where, "v", in.v, dtype, {s.tokens, s.v_heads, s.head_dim});
  const DType gates = gate_type(in.i_gate, dtype);
  require_tensor(where, "i_gate", in.i_gate, gates, {s.tokens, s.states});
  require_tensor(where, "f_gate", in.f_gate, gates, {s.tokens, s.states});
  require_tensor(where, "starts", in.starts, DType::u8, {s.tokens});
  if (in.initial) {
    check_state(where, in.initial, state_type(dtype), s.states, s.head_dim);
  }
  return s;
}

// h and its like: [tokens, heads, head_dim].
void check_reads(const char* where,
                 const char* name,
                 const ConstTensorView& tensor,
                 const MlstmInputs& in,
                 const MlstmSizes& s) {
  require_tensor(where, name, tensor, in.k.dtype, {s.tokens, s.heads, s.head_dim});
}

}  // namespace

void MlstmForward::check() const {
  constexpr auto kWhere = "mlstm";
  const MlstmSizes s = check_inputs(kWhere, inputs);
  check_reads(kWhere, "q", inputs.q, inputs, s);
  check_reads(kWhere, "h", h, inputs, s);
  if (final) {
    check_state(kWhere, final, state_type(inputs.k.dtype), s.states, s.head_dim);
  }
}

void MlstmBackward::check() const {
  constexpr auto kWhere = "mlstm backward";
  const MlstmSizes s = check_inputs(kWhere, inputs);
  const DType dtype = inputs.k.dtype;
  check_reads(kWhere, "q", inputs.q, inputs, s);
  check_reads(kWhere, "h", h, inputs, s);
  check_reads(kWhere, "d_h", d_h, inputs, s);
  check_reads(kWhere, "d_q", d_q, inputs, s);
  require_tensor(kWhere, "d_k", d_k, dtype, inputs.k.shape);
  require_tensor(kWhere, "d_v", d_v, dtype, inputs.v.shape);
  const DType gates = inputs.i_gate.dtype;
  const DType states = state_type(dtype);
  require_tensor(kWhere, "d_i_gate", d_i_gate, gates, inputs.i_gate.shape);
  require_tensor(kWhere, "d_f_gate", d_f_gate, gates, inputs.f_gate.shape);
  if (d_initial_c || d_initial_n) {
    BIFOCAL_REQUIRE(static_cast<bool>(inputs.initial),
                    "[{}] wanted inputs.initial beside d_initial_c and d_initial_n, got none: pass "
                    "the state or leave its gradient out",
                    kWhere);
    require_tensor(kWhere, "d_initial_c", d_initial_c, states, inputs.initial.c.shape);
    require_tensor(kWhere, "d_initial_n", d_initial_n, states, inputs.initial.n.shape);
  }
  if (d_final_c || d_final_n) {
    require_tensor(kWhere, "d_final_c", d_final_c, states, {s.states, s.head_dim, s.head_dim});
    require_tensor(kWhere, "d_final_n", d_final_n, states, {s.states, s.head_dim});
  }
}

void MlstmSummarise::check() const {
  constexpr auto kWhere = "mlstm summary";
  MlstmInputs read = inputs;
  read.q = {};
  read.initial = {};
  const MlstmSizes s = check_inputs(kWhere, read);
  require_tensor(kWhere,
                 "summary",
                 summary,
                 state_type(inputs.k.dtype),
                 {mlstm_summary_size(s.states, s.head_dim)});
}

void MlstmFold::check() const {
  constexpr auto kWhere = "mlstm fold";
  const std::int64_t states = state.n.shape[0];
  const std::int64_t head_dim = state.n.shape[1];
  check_state(kWhere, state, state.c.dtype, states, head_dim);
  require_tensor(kWhere,
                 "summaries",
                 summaries,
                 state.c.dtype,
                 {summaries.shape[0], mlstm_summary_size(states, head_dim)});
}

void MlstmGradientSummarise::check() const {
  constexpr auto kWhere = "mlstm gradient summary";
  const MlstmSizes s = check_inputs(kWhere, inputs);
  check_reads(kWhere, "q", inputs.q, inputs, s);
  check_reads(kWhere, "h", h, inputs, s);
  check_reads(kWhere, "d_h", d_h, inputs, s);
  BIFOCAL_REQUIRE(static_cast<bool>(inputs.initial),
                  "[{}] wanted inputs.initial, got none: pass the state before the shard",
                  kWhere);
  require_tensor(kWhere,
                 "summary",
                 summary,
                 state_type(inputs.k.dtype),
                 {mlstm_gradient_summary_size(s.states, s.head_dim)});
}

void MlstmGradientFold::check() const {
  constexpr auto kWhere = "mlstm gradient fold";
  const std::int64_t states = d_n.shape[0];
  const std::int64_t head_dim = d_n.shape[1];
  require_tensor(kWhere, "d_c", d_c, d_n.dtype, {states, head_dim, head_dim});
  require_tensor(kWhere, "d_n", d_n, d_n.dtype, {states, head_dim});
  require_tensor(kWhere,
                 "summaries",
                 summaries,
                 d_n.dtype,
                 {summaries.shape[0], mlstm_gradient_summary_size(states, head_dim)});
}

void MlstmStep::check() const {
  constexpr auto kWhere = "mlstm step";
  const std::int64_t rows = k.shape[0];
  const MlstmSizes s{.tokens = rows,
                     .heads = q.shape[1],
                     .states = k.shape[1],
                     .v_heads = v.shape[1],
                     .head_dim = k.shape[2]};
  const DType dtype = k.dtype;
  const std::int64_t held = m.shape[0];
  check_counts(kWhere, s);
  const DType gates = gate_type(i_gate, dtype);
  const DType states = state_type(dtype);
  require_tensor(kWhere, "q", q, dtype, {rows, s.heads, s.head_dim});
  require_tensor(kWhere, "k", k, dtype, {rows, s.states, s.head_dim});
  require_tensor(kWhere, "v", v, dtype, {rows, s.v_heads, s.head_dim});
  require_tensor(kWhere, "i_gate", i_gate, gates, {rows, s.states});
  require_tensor(kWhere, "f_gate", f_gate, gates, {rows, s.states});
  require_tensor(kWhere, "h", h, dtype, {rows, s.heads, s.head_dim});
  require_tensor(kWhere, "c", c, states, {held, s.states, s.head_dim, s.head_dim});
  require_tensor(kWhere, "n", n, states, {held, s.states, s.head_dim});
  require_tensor(kWhere, "m", m, states, {held, s.states});
  require_tensor(kWhere, "sequences", sequences, DType::i32, {rows});
}

}  // namespace bifocal
