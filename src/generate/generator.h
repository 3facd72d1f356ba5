// Token by token generation with a cache of constant size: a ring of recent keys and values, pinned
// sink tokens and the mLSTM's state. Full-attention layers (the teacher's) cache every token up to
// a capacity.
#pragma once

#include <cstdint>
#include <vector>

#include "model/decoder.h"

namespace bifocal {

class Generator {
 public:
  // batch sequences advance together. capacity: most tokens of a sequence, for full-attention
  // layers alone. The decoder must outlive the generator.
  Generator(Context context, Decoder& decoder, std::int64_t batch, std::int64_t capacity);

  // Feeds one token to every active sequence, each at its own position. ids, active: [batch].
  void feed(const std::vector<std::int32_t>& ids, const std::vector<std::uint8_t>& active);

  // Logits [batch, vocabulary] after the last feed; those of inactive sequences mean nothing. Valid
  // until the next call.
  ConstTensorView logits();

  // All sequences back to empty.
  void reset();

  std::int64_t batch() const { return batch_; }

  // Bytes of all caches and states.
  std::size_t cache_bytes() const;

 private:
  struct LayerCache {
    std::int64_t slots = 0;
    Tensor k, v;     // [batch, slots, kv_heads * head_dim]
    Tensor c, n, m;  // [batch, states, d, d], [batch, states, d], [batch, states]
  };

  void layer(std::int64_t index, const LayerWeights& weights, const Rope& rope, Tensor& x);
  Tensor mix(std::int64_t index, const LayerWeights& weights, const Rope& rope, const Tensor& a);
  Tensor near(LayerCache& cache,
              const MixerSettings& mixer,
              const LayerWeights& weights,
              const Tensor& q);
  Tensor far(LayerCache& cache,
             const LayerWeights& weights,
             const Tensor& a,
             const ConstTensorView& q,
             const ConstTensorView& k,
             const ConstTensorView& v);
  void write_cache(LayerCache& cache, const MixerSettings& mixer, const Tensor& k, const Tensor& v);

  Tensor activation(const Shape& shape) {
    return context_.memory.empty(Region::activations, context_.dtype, shape);
  }

  Context context_;
  Decoder* decoder_;
  std::int64_t batch_;
  std::vector<LayerCache> caches_;
  Tensor positions_;  // [batch] i32: tokens fed so far
  Tensor active_;     // [batch] u8
  Tensor hidden_;     // [batch, D] after the final norm
  Tensor logits_;     // [batch, vocabulary]
};

struct GenerateOptions {
  std::int64_t max_new_tokens = 256;
  double temperature = 0.0;
  std::int64_t top_k = 0;
  double top_p = 1.0;
  std::uint64_t seed = 0;
  std::vector<std::int32_t> stop_ids;
};

struct GeneratedAnswer {
  std::vector<std::int32_t> ids;  // the stop token included
  bool stopped = false;           // false: max_new_tokens reached
};

// Answers to at most generator.batch() prompts, each of at least one token. Random streams are
// first_stream, first_stream + 1, ..., so an answer does not depend on what shares its batch.
std::vector<GeneratedAnswer> generate(Context context,
                                      Generator& generator,
                                      const std::vector<std::vector<std::int32_t>>& prompts,
                                      std::int64_t first_stream,
                                      const GenerateOptions& options);

}  // namespace bifocal
