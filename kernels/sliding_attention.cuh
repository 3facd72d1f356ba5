// What the kernels of sliding attention share. Three families compute it: plain kernels, for any
// type and head width; tiles on tensor cores, for bfloat16 and head widths 64, 128 and 256; and for
// the same on Hopper its own products and copies.
//
// The query heads of a key-value head read the same keys, so its queries are one matrix of packed
// rows: row p is token p / group, head p % group of the key-value head's.
#pragma once

#include <cstdint>

#include "kernels/cuda_stream.h"
#include "kernels/warp.cuh"
#include "ops/sliding_attention.h"

namespace bifocal {

// The inputs as arrays. Numbers of keys and packed rows fit int, offsets may not.
template <class T>
struct AttentionArgs {
  int tokens, keys, heads, kv_heads, group, dim, pinned;
  float scale;  // of logits
  const T *q, *k, *v, *sink, *pinned_k, *pinned_v;
  const std::int32_t *key_begin, *pinned_begin, *pinned_end;

  explicit AttentionArgs(const AttentionInputs& in);

  __host__ __device__ int rows() const { return tokens * group; }

  // The key of token 0.
  __host__ __device__ int own() const { return keys - tokens; }

  // Offset of packed row `row` of a key-value head in [tokens, heads].
  __device__ std::int64_t query_row(int kv_head, int row) const {
    return static_cast<std::int64_t>(row / group) * heads + kv_head * group + row % group;
  }

  // Offset of a key in [keys, kv_heads] or [pinned, kv_heads].
  __device__ std::int64_t key_row(int kv_head, int key) const {
    return static_cast<std::int64_t>(key) * kv_heads + kv_head;
  }
};

// What the backward pass reads and writes besides.
template <class T>
struct AttentionGradients {
  T *d_q, *d_k, *d_v, *d_pinned_k, *d_pinned_v;
  const T* d_out;
  const float *lse, *delta;  // [tokens, heads]
};

// Keys [begin, end).
struct KeySpan {
  int begin, end;

  __device__ bool contains(int key) const { return begin <= key && key < end; }
};

// What a token sees of the window's keys.
template <class T>
__device__ KeySpan window_span(const AttentionArgs<T>& a, int token) {
  return {a.key_begin[token], a.own() + token + 1};
}

// What a token sees of the pinned keys.
template <class T>
__device__ KeySpan pinned_span(const AttentionArgs<T>& a, int token) {
  return {a.pinned_begin[token], a.pinned_end[token]};
}

// The number of leading elements <= value of a non-decreasing array. The whole warp searches.
__device__ inline int warp_upper_bound(const std::int32_t* values, int size, int value) {
  const int lane = lane_id();
  int begin = 0;  // the answer lies in [begin, begin + left]
  int left = size;
  while (left > 0) {
    const int step = (left + 31) / 32;
    const int at = (lane + 1) * step - 1;
    const bool passed = at < left && values[begin + at] <= value;
    const int steps = __popc(__ballot_sync(0xffffffffU, passed));
    begin += steps * step;
    left = min(step - 1, left - steps * step);
  }
  return begin;
}

template <class T>
void attend_plain(CudaStream& stream, const AttentionArgs<T>& args, T* out, float* lse);

// Every gradient but d_sink.
template <class T>
void differentiate_plain(CudaStream& stream,
                         const AttentionArgs<T>& args,
                         const AttentionGradients<T>& gradients);

// The same on tensor cores, where has_tiles allows.
void attend_tiles(CudaStream& stream,
                  const AttentionArgs<BFloat16>& args,
                  BFloat16* out,
                  float* lse);

// The same by Hopper's own instructions, where use_hopper_kernels() allows besides.
void attend_hopper(CudaStream& stream,
                   const AttentionArgs<BFloat16>& args,
                   BFloat16* out,
                   float* lse);

void differentiate_query_tiles(CudaStream& stream,
                               const AttentionArgs<BFloat16>& args,
                               const AttentionGradients<BFloat16>& gradients);

void differentiate_key_tiles(CudaStream& stream,
                             const AttentionArgs<BFloat16>& args,
                             const AttentionGradients<BFloat16>& gradients);

// Of the pinned keys alone.
void differentiate_pinned_tiles(CudaStream& stream,
                                const AttentionArgs<BFloat16>& args,
                                const AttentionGradients<BFloat16>& gradients);

// Whether Hopper's kernels serve the backward pass of this shape, where tiles do and
// use_hopper_kernels() allows.
bool has_hopper_backward(const AttentionArgs<BFloat16>& args);

// The whole backward pass by Hopper's own instructions: `gradients`, of which delta is not read and
// all others are null or none, and with a sink d_sink.
void differentiate_hopper(CudaStream& stream,
                          const AttentionArgs<BFloat16>& args,
                          AttentionGradients<BFloat16> gradients,
                          const BFloat16* out,
                          float* d_sink);

}  // namespace bifocal
