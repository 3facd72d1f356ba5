// Arithmetic of caches.
#include "plan/cache_memory.h"

#include <algorithm>
#include <cmath>

namespace bifocal {

namespace {

constexpr double kCacheBytes = 2.0;  // bf16
constexpr double kStateBytes = 4.0;  // float32

}  // namespace

double cached_token_bytes(const ModelConfig& model) {
  return 2.0 * static_cast<double>(model.kv_width()) * kCacheBytes;
}

double layer_cache_bytes(const MixerSettings& mixer,
                         const ModelConfig& model,
                         std::int64_t context_tokens) {
  const double tokens =
      mixer.is_full() ? static_cast<double>(context_tokens) : cached_tokens(mixer, model);
  return tokens * cached_token_bytes(model);
}

double sequence_cache_bytes(const ModelConfig& model, std::int64_t context_tokens) {
  double bytes = 0.0;
  for (const MixerSettings& mixer : model.mixers) {
    bytes += layer_cache_bytes(mixer, model, context_tokens);
  }
  return bytes;
}

double LinearLayer::cache_bytes() const {
  const auto state = static_cast<double>(value_heads * key_dim * value_dim);
  const auto channels = static_cast<double>(2 * key_heads * key_dim + value_heads * value_dim);
  return state * kStateBytes + channels * static_cast<double>(conv_kernel - 1) * kCacheBytes;
}

bool NativeLayout::is_full_attention() const {
  return std::all_of(
      layers.begin(), layers.end(), [](LayerKind kind) { return kind == LayerKind::full; });
}

double native_cache_bytes(const NativeLayout& layout,
                          const ModelConfig& model,
                          std::int64_t context_tokens) {
  double bytes = 0.0;
  for (const LayerKind kind : layout.layers) {
    if (kind == LayerKind::linear) {
      bytes += layout.linear.cache_bytes();
    } else {
      const std::int64_t tokens =
          kind == LayerKind::full ? context_tokens : std::min(layout.window, context_tokens);
      bytes += static_cast<double>(tokens) * cached_token_bytes(model);
    }
  }
  return bytes;
}

std::int64_t sequences_that_fit(double card_bytes, double weight_bytes, double sequence_bytes) {
  const double free_bytes = std::max(0.0, card_bytes - weight_bytes);
  return static_cast<std::int64_t>(std::floor(free_bytes / sequence_bytes));
}

}  // namespace bifocal
