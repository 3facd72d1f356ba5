// A layer's work on one token of each of some sequences, in few ops: on a GPU each is one launch or
// two, which between them take as long as what they compute. A row's result does not depend on the
// other rows, not in one bit. Rows' positions, slots and lengths lie on the device.
//
// x, y and vectors are of one type; matrices are of it too, or bfloat16 beside float32. "As sums":
// of that type, but float32 beside bfloat16.
#pragma once

#include <span>

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/mlstm.h"
#include "ops/run.h"

namespace bifocal {

// y = the rows of a table that ids name. An id outside of it is an Error; on GPUs, which are not
// waited for, its row becomes NaN.
struct DecodeEmbedding {
  TensorView y;           // [rows, width]
  ConstTensorView ids;    // [rows] i32
  ConstTensorView table;  // [vocabulary, width]
  void check() const;
};

// y = (add +) norm(x) weight^T (+ bias).
struct DecodeProduct {
  TensorView y;            // [rows, out], type of x or as sums
  ConstTensorView weight;  // [out, in]
  ConstTensorView bias;    // [out], optional
  ConstTensorView add;     // [rows, out], optional, type of y; may be y itself
};

// Several products of the same rows.
struct DecodeProducts {
  static constexpr std::size_t kMost = 6;

  std::span<const DecodeProduct> products;  // at most kMost, on the host
  ConstTensorView x;                        // [rows, in]
  ConstTensorView norm;  // [in], optional: the weight of an RMSNorm that x goes through first
  double eps = 1e-6;
  void check() const;
};

// y = silu(norm(x) gate^T) * (norm(x) up^T).
struct DecodeGatedProduct {
  TensorView y;              // [rows, out]
  ConstTensorView x;         // [rows, in]
  ConstTensorView norm;      // [in]
  ConstTensorView gate, up;  // [out, in]
  double eps = 1e-6;
  void check() const;
};

// From projections to what the mixer reads: per-head norms and rotary positions of queries and
// keys, keys and values into the caches, softmax features (ops/feature_map.h).
struct DecodeHeads {
  TensorView q;  // [rows, heads, head_dim] rotated
  // [rows] of [capacity, kv_heads * head_dim], on the host; empty without a window.
  std::span<const TensorView> k_cache, v_cache;
  ConstTensorView places;           // [rows] i32: slots to write, with caches
  TensorView feature_q, feature_k;  // [rows, heads, head_dim], [rows, states, head_dim]; optional
  ConstTensorView projected_q;      // [rows, heads, head_dim]
  ConstTensorView projected_k, v;   // [rows, kv_heads, head_dim]
  ConstTensorView q_norm, k_norm;   // [head_dim], optional together
  ConstTensorView cos, sin;         // [rows, head_dim / 2], as sums
  ConstTensorView feature_q_weight, feature_k_weight;  // [heads | states, head_dim, head_dim]
  double eps = 1e-6;
  void check() const;
};

// Attention over the caches, a step of the mLSTM, and their mixture: o far + (1 - o) near with o =
// sigmoid(gate), or the sum without a gate, or the one branch that there is.
//
// A GPU reads states, lengths, sequences and, where `newest` is given, all other slots before the
// ops just before have ended. So after what writes them comes an op that is not of a layer before
// the layer's ops: DecodeEmbedding, for one, at the beginning of every token. The same holds for
// the angles of DecodeHeads.
struct DecodeMixer {
  struct Near {
    ConstTensorView q;  // [rows, heads, head_dim]
    // [rows] of [capacity, kv_heads * head_dim], on the host; empty without a window.
    std::span<const ConstTensorView> k, v;
    ConstTensorView lengths;  // [rows] i32: slots that are read, at least one
    ConstTensorView newest;   // [rows] i32: the slots that DecodeHeads wrote; optional
    ConstTensorView sink;     // [heads], optional
  };

  struct Far {
    TensorView c, n, m;              // of all sequences, as in MlstmStep; as sums
    ConstTensorView q, k;            // features [rows, heads | states, head_dim]
    ConstTensorView v;               // [rows, kv_heads, head_dim]
    ConstTensorView i_gate, f_gate;  // [rows, states], as sums
    ConstTensorView sequences;       // [rows] i32, distinct
  };

  TensorView y;          // [rows, heads, head_dim]
  TensorView workspace;  // [decode_mixer_workspace] f32
  Near near;
  Far far;
  ConstTensorView gate;  // [rows, heads], as sums, optional
  void check() const;
};

// Parts of a row's slots that are read side by side, at most.
inline constexpr std::int64_t kDecodeSplits = 64;

// Numbers of DecodeMixer's workspace for this many rows.
std::int64_t decode_mixer_workspace(std::int64_t rows, std::int64_t heads, std::int64_t head_dim);

void run(CpuStream&, const DecodeEmbedding&);
void run(CpuStream&, const DecodeProducts&);
void run(CpuStream&, const DecodeGatedProduct&);
void run(CpuStream&, const DecodeHeads&);
void run(CpuStream&, const DecodeMixer&);
void run(CudaStream&, const DecodeEmbedding&);
void run(CudaStream&, const DecodeProducts&);
void run(CudaStream&, const DecodeGatedProduct&);
void run(CudaStream&, const DecodeHeads&);
void run(CudaStream&, const DecodeMixer&);

}  // namespace bifocal
