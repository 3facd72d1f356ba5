// The order of the kernels of the mLSTM's backward pass on Hopper.
#include "kernels/kernel_choice.h"
#include "kernels/mlstm_hopper_backward.cuh"

namespace bifocal {
namespace {

MlstmRoundedStates take_states(DeviceScratch& scratch, const MlstmShape& shape) {
  const std::int64_t features = static_cast<std::int64_t>(shape.chunks) * shape.states * shape.dim;
  return {scratch.take<BFloat16>(features * shape.dim), scratch.take<float>(features)};
}

CUtensorMap map_of(const MlstmShape& shape, const BFloat16* x, int heads) {
  return make_tensor_map(
      x,
      {{shape.dim, 1, hopper::kSwizzleColumns},
       {heads, shape.dim, 1},
       {shape.tokens, static_cast<std::int64_t>(heads) * shape.dim, kMlstmChunk}});
}

}  // namespace

bool has_hopper_mlstm_backward(const MlstmArrays<BFloat16>& a) {
  return use_hopper_kernels() && (a.shape.dim == 64 || a.shape.dim == 128) && a.shape.tokens > 0 &&
         is_aligned(16, a.q, a.k, a.v, a.d_h, a.d_q, a.d_k, a.d_v);
}

void hopper_mlstm_backward(CudaStream& stream,
                           DeviceScratch& scratch,
                           const MlstmArrays<BFloat16>& a,
                           const MlstmScanTargets& states,
                           const MlstmScanTargets& gradients) {
  const MlstmShape& shape = a.shape;
  const std::int64_t head_chunks = static_cast<std::int64_t>(shape.heads) * shape.chunks;
  const HopperMlstm m{.a = a,
                      .entering = take_states(scratch, shape),
                      .leaving = take_states(scratch, shape),
                      .reads = scratch.take<MlstmReadScalars>(head_chunks),
                      .read_scales = scratch.take<MlstmRowScales>(head_chunks)};
  const hopper::MlstmMaps maps{.q = map_of(shape, a.q, shape.heads),
                               .k = map_of(shape, a.k, shape.states),
                               .v = map_of(shape, a.v, shape.v_heads),
                               .d_h = map_of(shape, a.d_h, shape.heads)};
  auto* write_scales =
      scratch.take<MlstmRowScales>(static_cast<std::int64_t>(shape.states) * shape.chunks);
  hopper::mlstm_write_scales(stream, shape, a.scalars, write_scales);
  hopper::mlstm_states(stream,
                       scratch,
                       m,
                       {maps.k, maps.v, write_scales, 1, shape.holders, false},
                       m.entering,
                       states);
  hopper::mlstm_query_gradients(stream, m, maps);
  hopper::mlstm_states(stream,
                       scratch,
                       m,
                       {maps.q, maps.d_h, m.read_scales, shape.readers, 1, true},
                       m.leaving,
                       gradients);
  hopper::mlstm_key_gradients(stream, m, maps);
}

}  // namespace bifocal
