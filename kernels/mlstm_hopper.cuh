// What the mLSTM's forward and backward pass on Hopper share.
#pragma once

#include "kernels/mlstm_problem.cuh"
#include "kernels/wgmma.cuh"

namespace bifocal {

// x [tokens, heads, dim] in boxes of one chunk of a head and 64 columns.
inline CUtensorMap mlstm_map(const MlstmShape& shape, const BFloat16* x, int heads) {
  return make_tensor_map(
      x,
      {{shape.dim, 1, hopper::kSwizzleColumns},
       {heads, shape.dim, 1},
       {shape.tokens, static_cast<std::int64_t>(heads) * shape.dim, kMlstmChunk}});
}

}  // namespace bifocal
