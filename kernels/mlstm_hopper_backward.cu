// The order of the kernels of the mLSTM's backward pass on Hopper.
#include "kernels/kernel_choice.h"
#include "kernels/mlstm_hopper_backward.cuh"

namespace bifocal {
namespace {

MlstmRoundedStates take_states(DeviceScratch& scratch, const MlstmShape& shape) {
  const std::int64_t features = static_cast<std::int64_t>(shape.chunks) * shape.states * shape.dim;
  return {scratch.take<BFloat16>(features * shape.dim), scratch.take<float>(features)};
}

}  // namespace

bool has_hopper_mlstm_backward(const MlstmArrays<BFloat16>& a) {
  return use_hopper_kernels() && (a.shape.dim == 64 || a.shape.dim == 128) && a.shape.tokens > 0 &&
         is_aligned(16, a.q, a.k, a.v, a.d_h, a.d_q, a.d_k, a.d_v);
}

HopperMlstm plan_hopper_mlstm(DeviceScratch& scratch, const MlstmArrays<BFloat16>& a) {
  const MlstmShape& shape = a.shape;
  const std::int64_t read_chunks = static_cast<std::int64_t>(shape.heads) * shape.chunks;
  const std::int64_t state_chunks = static_cast<std::int64_t>(shape.states) * shape.chunks;
  return {.a = a,
          .q = mlstm_map(shape, a.q, shape.heads),
          .k = mlstm_map(shape, a.k, shape.states),
          .v = mlstm_map(shape, a.v, shape.v_heads),
          .d_h = mlstm_map(shape, a.d_h, shape.heads),
          .entering = take_states(scratch, shape),
          .leaving = take_states(scratch, shape),
          .reads = scratch.take<MlstmReadScalars>(read_chunks),
          .read_scales = scratch.take<MlstmRowScales>(read_chunks),
          .write_scales = scratch.take<MlstmRowScales>(state_chunks)};
}

void hopper_mlstm_backward(CudaStream& stream,
                           DeviceScratch& scratch,
                           const HopperMlstm& m,
                           const MlstmScanTargets& states,
                           const MlstmScanTargets& gradients) {
  hopper::mlstm_write_scales(stream, m);
  hopper::mlstm_states(stream, scratch, m, states);
  hopper::mlstm_query_gradients(stream, m);
  hopper::mlstm_state_gradients(stream, scratch, m, gradients);
  hopper::mlstm_key_gradients(stream, m);
}

}  // namespace bifocal
