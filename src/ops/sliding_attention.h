// Causal attention over a window of a packed row, with a learned sink or pinned sink tokens.
// A window that reaches the document's start is the teacher's full attention.
//
// Keys lie in one buffer: those of earlier tokens (the halo, from other ranks or a cache) first,
// then this shard's own. Query t is key `keys - tokens + t` of that buffer and sees the keys from
// key_begin[t] to itself. Logits are q.k / sqrt(head_dim). The sink joins the softmax unscaled and
// carries no value. Pinned keys (the document's first tokens where they lie left of key_begin[t])
// stand in a buffer of their own; query t sees those in [pinned_begin[t], pinned_end[t]). Query
// head h reads key-value head h / (heads / kv_heads). "As sums": of the type of the other tensors,
// but float32 beside bfloat16 ones.
#pragma once

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

// What both passes read.
struct AttentionInputs {
  ConstTensorView q;          // [tokens, heads, head_dim]
  ConstTensorView k, v;       // [keys, kv_heads, head_dim], keys >= tokens
  ConstTensorView key_begin;  // [tokens] i32, non-decreasing, key_begin[t] <= keys - tokens + t
  ConstTensorView sink;       // [heads], optional
  ConstTensorView pinned_k, pinned_v;        // [pinned, kv_heads, head_dim], optional
  ConstTensorView pinned_begin, pinned_end;  // [tokens] i32, with pinned_k
};

struct SlidingAttentionForward {
  TensorView out;  // [tokens, heads, head_dim]
  TensorView lse;  // [tokens, heads], as sums: log of the softmax denominator, sink included
  AttentionInputs inputs;
  void check() const;
};

// All gradients but d_sink are overwritten. With a sink all others may be left out together: the
// sink's alone costs one pass over out. d_sink is added to: ds_h = -sum_t exp(s_h - L_t) (d_out_t .
// out_t).
struct SlidingAttentionBackward {
  TensorView d_q;                     // [tokens, heads, head_dim]
  TensorView d_k, d_v;                // [keys, kv_heads, head_dim]
  TensorView d_sink;                  // [heads], as sums, with inputs.sink
  TensorView d_pinned_k, d_pinned_v;  // [pinned, kv_heads, head_dim], with inputs.pinned_k
  ConstTensorView d_out, out;         // [tokens, heads, head_dim]
  ConstTensorView lse;                // [tokens, heads], as sums
  AttentionInputs inputs;
  void check() const;
};

void run(CpuStream&, const SlidingAttentionForward&);
void run(CpuStream&, const SlidingAttentionBackward&);
void run(CudaStream&, const SlidingAttentionForward&);
void run(CudaStream&, const SlidingAttentionBackward&);

// The definition as plain loops, one query and one key at a time: what every other path is tested
// against.
void sliding_attention_definition(const SlidingAttentionForward& op);
void sliding_attention_definition(const SlidingAttentionBackward& op);

}  // namespace bifocal
