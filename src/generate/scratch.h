// Activations of generation: one buffer for each use, kept from token to token.
#pragma once

#include <map>

#include "model/context.h"

namespace bifocal {

// What a buffer is for. Buffers of one use are never needed at the same time.
enum class Use : std::uint8_t {
  ids,
  positions,
  starts,
  cos,
  sin,
  x,
  normed,
  q,
  k,
  v,
  pinned_k,
  pinned_v,
  near,
  lse,
  feature_q,
  feature_k,
  i_gate,
  f_gate,
  far,
  state_c,
  state_n,
  state_m,
  o_gate,
  step_o_gate,
  mixed,
  delta,
  gate,
  up,
  weight,
  hidden,
  logits,
  workspace,
};

// Buffers grow by doubling, so that prompts of all lengths leave less than the largest's memory
// behind, and a step that is no longer than the steps before it allocates nothing.
class Scratch {
 public:
  explicit Scratch(Memory& memory) : memory_(&memory) {}

  // Elements are undefined; valid until the next call for the same use.
  TensorView take(Use use, DType dtype, const Shape& shape);

  // How often a buffer has been replaced by a larger one: what was recorded before reads the old.
  std::int64_t times_grown() const { return times_grown_; }

 private:
  Memory* memory_;
  std::int64_t times_grown_ = 0;
  std::map<Use, Tensor> buffers_;
};

}  // namespace bifocal
