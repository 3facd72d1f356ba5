// What one layer remembers of each of `batch` sequences.
//
// Near branch, window W and n sink tokens: n + W slots of keys and values. Token t < n stands in
// slot t for good, the others go round the W slots behind. So the keys that a token sees are always
// slots [0, min(t + 1, n + W)). Full attention: token t in slot t, and more slots as they are
// needed. Far branch: the mLSTM's state.
#pragma once

#include <cstdint>
#include <vector>

#include "generate/chunk_plan.h"
#include "generate/scratch.h"
#include "ops/mlstm.h"
#include "ops/sliding_attention.h"

namespace bifocal {

class LayerCache {
 public:
  LayerCache(Context context,
             const ModelConfig& config,
             const MixerSettings& settings,
             std::int64_t batch);

  const MixerSettings& settings() const { return settings_; }

  // Forgets the slot's sequence. A full layer gives its memory back.
  void reset(std::int64_t slot);

  std::size_t bytes() const;

  // Has slots for so many tokens, which only full layers may lack. Whether tensors have moved.
  bool make_room(std::int64_t slot, std::int64_t tokens);

  // Keys and values k, v [count, kv_heads, head_dim] of a chunk's tokens, by the plan of this
  // layer's kind of window.
  void append(std::int64_t slot,
              const ChunkPlan& plan,
              const ConstTensorView& k,
              const ConstTensorView& v);

  // The whole cache of a slot: [capacity, kv_width].
  TensorView keys(std::int64_t slot) const { return of(slot).k; }

  TensorView values(std::int64_t slot) const { return of(slot).v; }

  // What the tokens of a chunk read, q and sink excepted. k, v [halo + count, kv_heads, head_dim]
  // have the tokens' own keys at their end; the halo before them is filled here. A full layer wants
  // its tokens appended before, any other after.
  AttentionInputs attention_inputs(std::int64_t slot,
                                   const ChunkPlan& plan,
                                   const TensorView& k,
                                   const TensorView& v,
                                   Scratch& scratch);

  // The state of one sequence: [states, d, d], [states, d], [states].
  MlstmState state(std::int64_t slot) const;

  // The states of all: [batch, states, d, d], [batch, states, d], [batch, states].
  MlstmState states() const { return {c_, n_, m_}; }

 private:
  struct KeyValues {
    Tensor k, v;  // [capacity, kv_width]
  };

  void read(const Tensor& cache, const ConstTensorView& slots, const TensorView& rows) const;
  TensorView pinned_rows(
      Use use, const ChunkPlan& plan, const TensorView& own, const Tensor& cache, Scratch& scratch);

  KeyValues& of(std::int64_t slot) { return caches_[static_cast<std::size_t>(slot)]; }

  const KeyValues& of(std::int64_t slot) const { return caches_[static_cast<std::size_t>(slot)]; }

  Context context_;
  MixerSettings settings_;
  std::int64_t kv_heads_, head_dim_;
  std::vector<KeyValues> caches_;  // [batch], empty without near
  Tensor c_, n_, m_;               // empty without states
};

}  // namespace bifocal
