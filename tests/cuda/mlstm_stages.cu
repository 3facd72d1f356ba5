#include "cuda/mlstm_stages.h"
#include "kernels/mlstm_hopper_backward.cuh"

namespace bifocal::test {
namespace {

MlstmLogGradients take_logs(DeviceScratch& scratch, const MlstmShape& shape) {
  const std::int64_t rows = static_cast<std::int64_t>(shape.states) * shape.tokens;
  MlstmLogGradients logs{};
  logs.head_parts = logs.read_parts = logs.state_parts = 1;
  logs.through = scratch.take<float>(rows);
  logs.written = scratch.take<float>(rows);
  logs.read = scratch.take<float>(rows);
  logs.left = scratch.take<float>(rows);
  logs.passed = scratch.take<float>(static_cast<std::int64_t>(shape.states) * shape.chunks);
  return logs;
}

}  // namespace

std::vector<MlstmStage> mlstm_backward_stages(CudaStream& stream, const MlstmBackward& op) {
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
    return {};
  }
  const auto scratch = std::make_shared<DeviceScratch>(stream);
  a.scalars = scan_mlstm_gates(stream, *scratch, a.shape, op.inputs);
  a.logs = take_logs(*scratch, a.shape);
  const HopperMlstm m = plan_hopper_mlstm(*scratch, a);
  const auto bytes = [](const auto&... tensors) {
    return (0.0 + ... + static_cast<double>(tensors.bytes()));
  };
  const double states = 2.0 * static_cast<double>(a.shape.chunks) * a.shape.states * a.shape.dim *
                        a.shape.dim;  // of all chunks, in bfloat16
  const double writes = bytes(op.inputs.k, op.inputs.v);
  const double reads = bytes(op.inputs.q, op.d_h);
  const MlstmScanTargets none{};
  const auto inputs = op.inputs;
  return {{"gates",
           2.0 * bytes(inputs.i_gate, inputs.f_gate),
           [=, &stream] {
             DeviceScratch own(stream);
             scan_mlstm_gates(stream, own, a.shape, inputs);
           }},
          {"scales of keys", 0.0, [=, &stream] { hopper::mlstm_write_scales(stream, m); }},
          {"states",
           2.0 * writes + states,
           [=, &stream] {
             DeviceScratch own(stream);
             hopper::mlstm_states(stream, own, m, none);
           }},
          {"gradients of queries",
           reads + writes + states + bytes(op.d_q),
           [=, &stream] { hopper::mlstm_query_gradients(stream, m); }},
          {"gradients of states",
           2.0 * reads + states,
           [=, &stream] {
             DeviceScratch own(stream);
             hopper::mlstm_state_gradients(stream, own, m, none);
           }},
          {"gradients of keys and values",
           reads + writes + 2.0 * states + bytes(op.d_k, op.d_v),
           [=, &stream] {
             // The scratch that all stages share lives as long as any of them.
             static_cast<void>(scratch);
             hopper::mlstm_key_gradients(stream, m);
           }},
          {"gradients of gates", 0.0, [=, &stream] {
             mlstm_gate_gradients(stream, a.shape, a.logs, op);
           }}};
}

}  // namespace bifocal::test
