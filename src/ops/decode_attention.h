// One query per sequence over a key-value cache (generation).
#pragma once

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

// Each sequence has its own slots of keys and values; slot order does not matter, since keys carry
// their positions. Sequence b reads slots [0, counts[b]); counts[b] = 0 with no sink gives out = 0.
struct DecodeAttention {
  TensorView out;          // [batch, heads, head_dim]
  ConstTensorView q;       // [batch, heads, head_dim]
  ConstTensorView k, v;    // [batch, slots, kv_heads * head_dim]
  ConstTensorView counts;  // [batch] i32
  ConstTensorView sink;    // [heads], optional
  void check() const;
};

// cache[b, slots[b]] = rows[b]; a slot of -1 leaves sequence b as it is.
struct CacheWrite {
  TensorView cache;       // [batch, capacity, width]
  ConstTensorView rows;   // [batch, width]
  ConstTensorView slots;  // [batch] i32
  void check() const;
};

void run(CpuStream&, const DecodeAttention&);
void run(CpuStream&, const CacheWrite&);

}  // namespace bifocal
