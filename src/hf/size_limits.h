// The largest sizes that a config.json is believed: far above any model, and low enough that
// nothing which is counted from them (elements, bytes of all layers) leaves 64 bits, and no list by
// layer is huge.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bifocal {

inline constexpr std::size_t kMostConfigBytes = 16U << 20U;
inline constexpr std::int64_t kMostVocabulary = 1LL << 26;
inline constexpr std::int64_t kMostWidth = 1LL << 22;  // hidden, intermediate, heads * head_dim
inline constexpr std::int64_t kMostLayers = 1LL << 14;
inline constexpr std::int64_t kMostHeadDim = 1LL << 14;

}  // namespace bifocal
