// One query per sequence over that sequence's own cache of keys and values (generation), and the
// copies in and out of a cache.
#pragma once

#include <span>

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

// Row b reads all slots of k[b] and v[b]; slot order does not matter, since keys carry their
// positions. No slot gives out = 0. A row's result does not depend on the others. On CUDA it is a
// part of DecodeMixer (ops/decode_layer.h) alone.
struct DecodeAttention {
  TensorView out;     // [rows, heads, head_dim]
  ConstTensorView q;  // [rows, heads, head_dim]
  // [rows] of [slots of the row, kv_heads * head_dim]; the spans lie on the host.
  std::span<const ConstTensorView> k;
  std::span<const ConstTensorView> v;
  ConstTensorView sink;  // [heads], optional
  void check() const;
};

// cache[slots[i]] = rows[i], in order. On CUDA a slot outside of the cache writes nothing, and
// reads zeros below.
struct CacheWrite {
  TensorView cache;       // [capacity, width]
  ConstTensorView rows;   // [count, width]
  ConstTensorView slots;  // [count] i32
  void check() const;
};

// rows[i] = cache[slots[i]].
struct CacheRead {
  TensorView rows;        // [count, width]
  ConstTensorView cache;  // [capacity, width]
  ConstTensorView slots;  // [count] i32
  void check() const;
};

void run(CpuStream&, const DecodeAttention&);
void run(CpuStream&, const CacheWrite&);
void run(CpuStream&, const CacheRead&);
void run(CudaStream&, const CacheWrite&);
void run(CudaStream&, const CacheRead&);

}  // namespace bifocal
