// What one layer remembers of each of `batch` sequences.
//
// Near branch, window W and n sink tokens: n + W slots of keys and values. Token t < n stands in
// slot t for good, the others go round the W slots behind. So the keys that a token sees are always
// slots [0, min(t + 1, n + W)). Full attention: token t in slot t, and more slots as they are
// needed. Far branch: the mLSTM's state.
#pragma once

#include <cstdint>
#include <vector>

#include "config/model_config.h"
#include "generate/scratch.h"
#include "model/context.h"
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

  // Tokens before `position` that the window of token `position` reads from the cache.
  std::int64_t halo(std::int64_t position) const;

  // Keys and values k, v [count, kv_heads, head_dim] of tokens position, position + 1, ... Those
  // that later tokens will not see are left out.
  void append(std::int64_t slot,
              std::int64_t position,
              const ConstTensorView& k,
              const ConstTensorView& v);

  // What stands in the cache after `tokens` tokens: [visible, kv_width].
  ConstTensorView keys(std::int64_t slot, std::int64_t tokens) const;
  ConstTensorView values(std::int64_t slot, std::int64_t tokens) const;

  // What `count` tokens from `position` on read, q and sink excepted. k, v [halo + count, kv_heads,
  // head_dim] have the tokens' own keys at their end; the halo before them is filled here. A full
  // layer wants its tokens appended before, any other after.
  struct Chunk {
    std::int64_t slot = 0;
    std::int64_t position = 0;
    std::int64_t count = 0;
    TensorView k, v;
  };

  AttentionInputs attention_inputs(const Chunk& chunk, Scratch& scratch);

  // The state of one sequence: [states, d, d], [states, d], [states].
  MlstmState state(std::int64_t slot) const;

  // The states of all: [batch, states, d, d], [batch, states, d], [batch, states].
  MlstmState states() const { return {c_, n_, m_}; }

 private:
  struct KeyValues {
    Tensor k, v;  // [capacity, kv_width]
  };

  std::int64_t pinned() const { return settings_.sink == Sink::tokens ? settings_.sink_tokens : 0; }

  std::int32_t place_of(std::int64_t token) const;
  void make_room(KeyValues& cache, std::int64_t tokens);
  void read(const Tensor& cache, std::int64_t first, const TensorView& rows) const;
  TensorView pinned_rows(Use use, const Chunk& chunk, const Tensor& cache, Scratch& scratch);

  KeyValues& of(std::int64_t slot) { return caches_[static_cast<std::size_t>(slot)]; }

  const KeyValues& of(std::int64_t slot) const { return caches_[static_cast<std::size_t>(slot)]; }

  Context context_;
  MixerSettings settings_;
  std::int64_t kv_heads_, head_dim_;
  std::vector<KeyValues> caches_;                                    // [batch], empty without near
  Tensor c_, n_, m_;                                                 // empty without states
  std::vector<std::int32_t> key_begin_, pinned_begin_, pinned_end_;  // [count] of a chunk
};

}  // namespace bifocal
