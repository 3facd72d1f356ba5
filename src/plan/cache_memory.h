// What a sequence costs while a model generates: cached tokens and states, and how many sequences a
// card holds beside the weights.
#pragma once

#include <cstdint>
#include <vector>

#include "config/model_config.h"

namespace bifocal {

// Keys and values of one token in one layer, bf16: 2 * G * d * 2 bytes.
double cached_token_bytes(const ModelConfig& model);

// Bytes of one layer of a student: window and pinned tokens in bf16, states in float32; a full
// layer caches every token of the context.
double layer_cache_bytes(const MixerSettings& mixer,
                         const ModelConfig& model,
                         std::int64_t context_tokens);

// The same over all layers of model.mixers: what one sequence takes.
double sequence_cache_bytes(const ModelConfig& model, std::int64_t context_tokens);

// How one layer of a model that others built remembers.
enum class LayerKind : std::uint8_t { full, sliding, linear };

// A linear attention layer (gated delta rule) keeps a float32 matrix per value head and the last
// conv_kernel - 1 inputs of its convolution over queries, keys and values, in bf16.
struct LinearLayer {
  std::int64_t key_heads = 0;
  std::int64_t value_heads = 0;
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
  std::int64_t conv_kernel = 0;

  double cache_bytes() const;
};

// The layers as they are in the model's own configuration.
struct NativeLayout {
  std::vector<LayerKind> layers;
  std::int64_t window = 0;  // of sliding layers
  LinearLayer linear;

  bool is_full_attention() const;
};

double native_cache_bytes(const NativeLayout& layout,
                          const ModelConfig& model,
                          std::int64_t context_tokens);

// Whole sequences beside the weights; 0 where the weights alone are too large.
std::int64_t sequences_that_fit(double card_bytes, double weight_bytes, double sequence_bytes);

}  // namespace bifocal
