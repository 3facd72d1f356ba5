// The mLSTM's ops on the device: the order of kernels.
#include <type_traits>

#include "kernels/mlstm_hopper_backward.cuh"
#include "ops/mlstm.h"

namespace bifocal {
namespace {

void require_state(const char* where, const ConstMlstmState& state) {
  if (state) {
    require_type(where, "state c", state.c, DType::f32);
    require_type(where, "state n", state.n, DType::f32);
    require_type(where, "state m", state.m, DType::f32);
  }
}

const float* floats(const ConstTensorView& x) {
  return x ? x.as<float>() : nullptr;
}

float* floats(const TensorView& x) {
  return x ? x.as<float>() : nullptr;
}

struct LogParts {
  int head, read, state;
};

MlstmLogGradients take_log_gradients(DeviceScratch& scratch,
                                     const MlstmShape& shape,
                                     const LogParts& parts) {
  const std::int64_t rows = static_cast<std::int64_t>(shape.states) * shape.tokens;
  MlstmLogGradients logs{};
  logs.head_parts = parts.head;
  logs.read_parts = parts.read;
  logs.state_parts = parts.state;
  logs.through = scratch.take<float>(rows * parts.head);
  logs.written = scratch.take<float>(rows * parts.head);
  logs.read = scratch.take<float>(rows * parts.read);
  logs.left = scratch.take<float>(rows * parts.state);
  logs.passed =
      scratch.take<float>(static_cast<std::int64_t>(shape.states) * parts.state * shape.chunks);
  return logs;
}

void chunk_sums(CudaStream& stream, const MlstmArrays<float>& a) {
  plain_mlstm_sums(stream, a);
}

void chunk_sums(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  has_mma_mlstm(a, false) ? mma_mlstm_sums(stream, a) : plain_mlstm_sums(stream, a);
}

void chunk_reads(CudaStream& stream, const MlstmArrays<float>& a) {
  plain_mlstm_reads(stream, a);
}

void chunk_reads(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  has_mma_mlstm(a, false) ? mma_mlstm_reads(stream, a) : plain_mlstm_reads(stream, a);
}

// The whole forward pass on Hopper; false where it does not serve.
bool read_in_segments(CudaStream& /*stream*/,
                      const MlstmArrays<float>& /*a*/,
                      const MlstmScanTargets& /*targets*/) {
  return false;
}

bool read_in_segments(CudaStream& stream,
                      const MlstmArrays<BFloat16>& a,
                      const MlstmScanTargets& targets) {
  if (!has_hopper_mlstm(a)) {
    return false;
  }
  hopper_mlstm_forward(stream, a, targets);
  return true;
}

void chunk_read_gradients(CudaStream& stream, const MlstmArrays<float>& a) {
  plain_mlstm_read_gradients(stream, a);
}

void chunk_read_gradients(CudaStream& stream, const MlstmArrays<BFloat16>& a) {
  has_mma_mlstm(a, true) ? mma_mlstm_read_gradients(stream, a)
                         : plain_mlstm_read_gradients(stream, a);
}

// d_q, d_k, d_v and the gradients of log weights, for which it takes room.
void chunk_gradients(CudaStream& stream, DeviceScratch& scratch, MlstmArrays<float>& a) {
  a.logs = take_log_gradients(scratch, a.shape, {a.shape.readers, a.shape.readers, 1});
  plain_mlstm_gradients(stream, scratch, a);
}

void chunk_gradients(CudaStream& stream, DeviceScratch& scratch, MlstmArrays<BFloat16>& a) {
  if (has_mma_mlstm(a, true)) {
    const int parts = mma_mlstm_parts(a.shape.dim);
    a.logs = take_log_gradients(scratch, a.shape, {1, parts, parts});
    mma_mlstm_gradients(stream, a);
  } else {
    a.logs = take_log_gradients(scratch, a.shape, {a.shape.readers, a.shape.readers, 1});
    plain_mlstm_gradients(stream, scratch, a);
  }
}

template <class T>
MlstmArrays<T> scan_gates(CudaStream& stream, DeviceScratch& scratch, const MlstmInputs& inputs) {
  MlstmArrays<T> a{};
  a.shape = mlstm_shape(mlstm_sizes(inputs));
  a.scalars = scan_mlstm_gates(stream, scratch, a.shape, inputs);
  a.q = inputs.q ? inputs.q.as<T>() : nullptr;
  a.k = inputs.k.as<T>();
  a.v = inputs.v.as<T>();
  return a;
}

// The states before all chunks.
template <class T>
void make_states(CudaStream& stream,
                 DeviceScratch& scratch,
                 const MlstmScanTargets& targets,
                 MlstmArrays<T>& a) {
  a.x = scratch.take<float>(a.shape.state_at(a.shape.chunks, 0));
  if (a.shape.tokens > 0) {
    chunk_sums(stream, a);
  }
  scan_mlstm_states(stream, a.shape, a.scalars, a.x, targets);
}

template <class T>
MlstmArrays<T> enter_chunks(CudaStream& stream,
                            DeviceScratch& scratch,
                            const MlstmInputs& inputs,
                            const MlstmScanTargets& targets) {
  MlstmArrays<T> a = scan_gates<T>(stream, scratch, inputs);
  make_states(stream, scratch, targets, a);
  return a;
}

MlstmScanTargets from_initial(const MlstmInputs& inputs) {
  return {floats(inputs.initial.c), floats(inputs.initial.n), nullptr, nullptr};
}

template <class T>
void forward(CudaStream& stream, const MlstmForward& op) {
  DeviceScratch scratch(stream);
  MlstmScanTargets targets = from_initial(op.inputs);
  targets.end_c = floats(op.final.c);
  targets.end_n = floats(op.final.n);
  MlstmArrays<T> a = scan_gates<T>(stream, scratch, op.inputs);
  a.h_out = op.h.as<T>();
  if (!read_in_segments(stream, a, targets)) {
    make_states(stream, scratch, targets, a);
    if (a.shape.tokens > 0) {
      chunk_reads(stream, a);
    }
  }
  if (op.final) {
    store_mlstm_scalars(stream, a.scalars, a.shape.states, op.final.m.as<float>(), nullptr);
  }
}

// The gradients of reads and of the states after all chunks.
template <class T>
void differentiate_states(CudaStream& stream,
                          DeviceScratch& scratch,
                          const ConstTensorView& h,
                          const ConstTensorView& d_h,
                          const MlstmScanTargets& targets,
                          MlstmArrays<T>& a) {
  const std::int64_t reads = static_cast<std::int64_t>(a.shape.heads) * a.shape.tokens;
  a.h = h.as<T>();
  a.d_h = d_h.as<T>();
  a.d_x = scratch.take<float>(a.shape.state_at(a.shape.chunks, 0));
  a.inverse = scratch.take<float>(reads);
  a.delta = scratch.take<float>(reads);
  if (a.shape.tokens > 0) {
    chunk_read_gradients(stream, a);
  }
  scan_mlstm_gradients(stream, a.shape, a.scalars, a.d_x, targets);
}

MlstmScanTargets from_final(const MlstmBackward& op) {
  return {
      floats(op.d_final_c), floats(op.d_final_n), floats(op.d_initial_c), floats(op.d_initial_n)};
}

// The same by Hopper's own instructions; false, and nothing done, where they do not serve.
bool backward_on_hopper(CudaStream& stream, const MlstmBackward& op) {
  MlstmArrays<BFloat16> a{};
  a.shape = mlstm_shape(mlstm_sizes(op.inputs));
  a.q = op.inputs.q.as<BFloat16>();
  a.k = op.inputs.k.as<BFloat16>();
  a.v = op.inputs.v.as<BFloat16>();
  a.d_h = op.d_h.as<BFloat16>();
  a.d_q = op.d_q.as<BFloat16>();
  a.d_k = op.d_k.as<BFloat16>();
  a.d_v = op.d_v.as<BFloat16>();
  if (!has_hopper_mlstm_backward(a)) {
    return false;
  }
  DeviceScratch scratch(stream);
  a.scalars = scan_mlstm_gates(stream, scratch, a.shape, op.inputs);
  a.logs = take_log_gradients(scratch, a.shape, {1, 1, 1});
  const HopperMlstm plan = plan_hopper_mlstm(scratch, a);
  hopper_mlstm_backward(stream, scratch, plan, from_initial(op.inputs), from_final(op));
  mlstm_gate_gradients(stream, a.shape, a.logs, op);
  return true;
}

template <class T>
void backward(CudaStream& stream, const MlstmBackward& op) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (backward_on_hopper(stream, op)) {
      return;
    }
  }
  DeviceScratch scratch(stream);
  MlstmArrays<T> a = enter_chunks<T>(stream, scratch, op.inputs, from_initial(op.inputs));
  differentiate_states(stream, scratch, op.h, op.d_h, from_final(op), a);
  if (a.shape.tokens == 0) {
    return;
  }
  a.d_q = op.d_q.as<T>();
  a.d_k = op.d_k.as<T>();
  a.d_v = op.d_v.as<T>();
  chunk_gradients(stream, scratch, a);
  mlstm_gate_gradients(stream, a.shape, a.logs, op);
}

template <class T>
void summarise(CudaStream& stream, const MlstmSummarise& op) {
  DeviceScratch scratch(stream);
  MlstmInputs inputs = op.inputs;
  inputs.q = {};
  inputs.initial = {};
  const MlstmShape shape = mlstm_shape(mlstm_sizes(inputs));
  float* c = op.summary.as<float>();
  float* n = c + static_cast<std::int64_t>(shape.states) * shape.dim * shape.dim;
  float* m = n + static_cast<std::int64_t>(shape.states) * shape.dim;
  const MlstmArrays<T> a = enter_chunks<T>(stream, scratch, inputs, {nullptr, nullptr, c, n});
  store_mlstm_scalars(stream, a.scalars, shape.states, m, m + shape.states);
}

template <class T>
void gradient_summarise(CudaStream& stream, const MlstmGradientSummarise& op) {
  DeviceScratch scratch(stream);
  MlstmArrays<T> a = enter_chunks<T>(stream, scratch, op.inputs, from_initial(op.inputs));
  float* d_c = op.summary.as<float>();
  float* d_n = d_c + static_cast<std::int64_t>(a.shape.states) * a.shape.dim * a.shape.dim;
  float* factor = d_n + static_cast<std::int64_t>(a.shape.states) * a.shape.dim;
  differentiate_states(stream, scratch, op.h, op.d_h, {nullptr, nullptr, d_c, d_n}, a);
  MlstmInputs alone = op.inputs;
  alone.initial = {};
  const MlstmScalars from_empty = scan_mlstm_gates(stream, scratch, a.shape, alone);
  store_mlstm_factor(
      stream, a.scalars, from_empty, a.shape.states, op.inputs.initial.m.as<float>(), factor);
}

}  // namespace

void run(CudaStream& stream, const MlstmForward& op) {
  require_state("mlstm", op.inputs.initial);
  require_state("mlstm", op.final);
  dispatch_device("mlstm", op.h.dtype, [&](auto zero) { forward<decltype(zero)>(stream, op); });
}

void run(CudaStream& stream, const MlstmBackward& op) {
  require_state("mlstm backward", op.inputs.initial);
  dispatch_device(
      "mlstm backward", op.d_q.dtype, [&](auto zero) { backward<decltype(zero)>(stream, op); });
}

void run(CudaStream& stream, const MlstmSummarise& op) {
  dispatch_device("mlstm summary", op.inputs.k.dtype, [&](auto zero) {
    summarise<decltype(zero)>(stream, op);
  });
}

void run(CudaStream& stream, const MlstmGradientSummarise& op) {
  dispatch_device("mlstm gradient summary", op.inputs.k.dtype, [&](auto zero) {
    gradient_summarise<decltype(zero)>(stream, op);
  });
}

}  // namespace bifocal
