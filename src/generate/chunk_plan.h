// Where the tokens of a prompt's chunk stand in the caches of layers with one kind of window, as
// numbers on the device.
#pragma once

#include <array>

#include "config/model_config.h"
#include "model/context.h"

namespace bifocal {

struct ChunkPlan {
  // Tokens [begin, end) of the chunk go to these slots.
  struct Write {
    std::int64_t begin = 0, end = 0;
    ConstTensorView slots;  // [end - begin] i32
  };

  std::int64_t position = 0;  // of the chunk's first token
  std::int64_t count = 0;
  std::int64_t halo = 0;    // tokens before the chunk that its windows read from the cache
  std::int64_t pinned = 0;  // pinned keys that any token of the chunk may see
  std::int64_t cached = 0;  // of these, in the cache already
  std::array<Write, 2> writes;
  ConstTensorView halo_slots;                // [halo] i32
  ConstTensorView pinned_slots;              // [cached] i32
  ConstTensorView key_begin;                 // [count] i32, see AttentionInputs
  ConstTensorView pinned_begin, pinned_end;  // [count] i32
  Tensor numbers;                            // what the views look at
};

// For tokens [position, position + count), of which those of later chunks will not see are not
// written.
ChunkPlan make_chunk_plan(Context context,
                          const MixerSettings& settings,
                          std::int64_t position,
                          std::int64_t count);

// Sink tokens of a layer.
inline std::int64_t pinned_tokens(const MixerSettings& settings) {
  return settings.sink == Sink::tokens ? settings.sink_tokens : 0;
}

// The ring of a layer's cache as CachePlaces counts it: 0 where every token is kept.
inline std::int64_t ring_tokens(const MixerSettings& settings) {
  return settings.is_full() ? 0 : settings.window;
}

}  // namespace bifocal
