// What the parts of the mixer's kernels have in common.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/vector.cuh"
#include "kernels/warp.cuh"
#include "ops/decode_layer.h"

namespace bifocal::decode_mixer {

inline constexpr int kThreads = 128;
inline constexpr int kWarps = kThreads / kWarp;
inline constexpr int kSplits = static_cast<int>(kDecodeSplits);
inline constexpr int kBatch = 16;    // slots that are taken at once; of a split at least
inline constexpr int kHeads = 4;     // query heads of a block, of one key-value head
inline constexpr int kElements = 8;  // of a key that a lane holds
inline constexpr int kMostDim = kElements * kWarp;
inline constexpr int kMostRows = 64;  // of a launch; their pointers fit the kernel's parameters

template <class T>
struct MixerArgs {
  const T* k[kMostRows];
  const T* v[kMostRows];
  const std::int32_t *lengths, *newest, *sequences;
  T* y;
  const T *q, *sink, *feature_q, *feature_k, *value;
  const float *i_gate, *f_gate, *gate;
  float *c, *n, *m;
  float* partial;  // [rows, heads, kSplits, dim + 2]: sum exp(logit - m) v, then m, sum of exp
  float* far;      // [rows, heads, dim]
  int heads, kv_heads, states, dim;
  int near_blocks, head_parts;  // of a split: kv_heads * head_parts; parts of a key-value head
  float scale;

  __device__ float* partial_of(int row, int head, int split) const {
    const std::int64_t at = (static_cast<std::int64_t>(row) * heads + head) * kSplits + split;
    return partial + at * (dim + 2);
  }
};

__host__ __device__ inline int split_slots(int slots) {
  const int least = (slots + kSplits - 1) / kSplits;
  return (least + kBatch - 1) / kBatch * kBatch;
}

__host__ __device__ inline int num_splits(int slots) {
  return slots == 0 ? 0 : (slots + split_slots(slots) - 1) / split_slots(slots);
}

// Factors of the old state and of the new product. The new m is rounded before it is used, so that
// C and n stand at the scale of the m that is stored: what its rounding leaves of the decayed m is
// known exactly (Knuth's sum of two numbers).
struct StepGates {
  float forget, input, m;

  __host__ __device__ StepGates(float i_gate, float f_gate, float before) {
    const float log_forget = fminf(f_gate, 0.0F) - log1pf(expf(-fabsf(f_gate)));
    const float carried = log_forget + before;
    const float part = carried - log_forget;
    const float rest =
        std::isinf(carried) ? 0.0F : (log_forget - (carried - part)) + (before - part);
    m = fmaxf(carried, i_gate);
    forget = expf((carried - m) + rest);
    input = expf(i_gate - m);
  }
};

}  // namespace bifocal::decode_mixer
