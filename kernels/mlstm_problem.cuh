// The mLSTM on the device: sizes, the scalars that all its kernels share, and the kernels' order.
//
// Chunks are [c L, (c + 1) L) of the row, L = kMlstmChunk: where documents start is known on the
// device only, so a start inside a chunk is a mask instead of a cut. m comes from a max-plus scan
// of the gates (mlstm_gates.cu). Then, of [C, n] in float32:
//   each chunk's own sum, in parallel -> scan over chunks -> reads of all chunks, in parallel,
// and backward the same from right to left.
#pragma once

#include <cstdint>

#include "kernels/device_scratch.h"
#include "kernels/launch.cuh"
#include "ops/mlstm_gates.h"

namespace bifocal {

inline constexpr int kMlstmChunk = 64;
inline constexpr float kMlstmFloatTiny = static_cast<float>(kMlstmTiny);  // joins a normaliser

struct MlstmShape {
  int tokens, chunks, heads, states, v_heads, dim;
  int readers;  // query heads of a state
  int holders;  // states of a value head

  // Numbers in one [C, n]: C [dim, dim] and then n [dim].
  __host__ __device__ std::int64_t state_size() const {
    return static_cast<std::int64_t>(dim) * (dim + 1);
  }

  // First number of a state of a chunk in [chunks, states, state_size].
  __host__ __device__ std::int64_t state_at(int chunk, int state) const {
    return (static_cast<std::int64_t>(chunk) * states + state) * state_size();
  }

  // Tokens of a chunk.
  __device__ int length(int chunk) const { return min(kMlstmChunk, tokens - chunk * kMlstmChunk); }

  __device__ std::int64_t head_row(int token, int head) const {
    return (static_cast<std::int64_t>(token) * heads + head) * dim;
  }

  __device__ std::int64_t key_row(int token, int state) const {
    return (static_cast<std::int64_t>(token) * states + state) * dim;
  }

  __device__ std::int64_t value_row(int token, int v_head) const {
    return (static_cast<std::int64_t>(token) * v_heads + v_head) * dim;
  }
};

MlstmShape mlstm_shape(const MlstmSizes& sizes);

// Exponents are of 2. They are formed in double and rounded before the exponential: a decay sum
// of -5,000 in float32 would leave differences of neighbouring tokens three digits. A double sum
// per weight of a decay matrix is far less than the work that the weight does.
struct MlstmScalars {
  double* row;     // [states, tokens] b_t - m_t, b summed from the chunk's or document's start
  double* column;  // [states, tokens] i_j - b_j
  double* before;  // [states, chunks] m before the chunk; -inf where no state enters
  float* pass;     // [states, chunks] what a state keeps across the chunk
  int* first;      // [tokens] first token of the chunk that this one sees; -1: all, and the state
  // [states], natural: after the last token, and the sum of log decays (-inf past a start).
  double* last_m;
  double* total_decay;
};

// The weight of token `from` in the read of token `to` of its chunk, both in the row's numbering.
__device__ inline float mlstm_weight(double row, double column) {
  return exp2f(static_cast<float>(row + column));
}

// A chunk's scalars as kernels on tensor cores read them. Exponents are sums of two floats: (row +
// column) is exact or rounds by less than a roundoff of itself, so the parts below add what float32
// sums would have lost.
struct MlstmChunkValues {
  float row_high[kMlstmChunk], row_low[kMlstmChunk];
  float column_high[kMlstmChunk], column_low[kMlstmChunk];
  float carry[kMlstmChunk];  // u_t
  float write[kMlstmChunk];  // w_j, at the scale of the chunk's end
  int first[kMlstmChunk];    // first token seen, in the chunk's numbering; 64 past the end

  // By threads [0, 64). Ends without a barrier.
  __device__ void load(const MlstmShape& shape, const MlstmScalars& from, int chunk, int state) {
    const int t = static_cast<int>(threadIdx.x);
    if (t >= kMlstmChunk) {
      return;
    }
    const int begin = chunk * kMlstmChunk;
    const int length = shape.length(chunk);
    const std::int64_t at = static_cast<std::int64_t>(state) * shape.tokens + begin;
    const bool present = t < length;
    const double row = present ? from.row[at + t] : 0.0;
    const double column = present ? from.column[at + t] : 0.0;
    row_high[t] = static_cast<float>(row);
    row_low[t] = rest_of(row, row_high[t]);
    column_high[t] = static_cast<float>(column);
    column_low[t] = rest_of(column, column_high[t]);
    const int seen = present ? from.first[begin + t] : 0;
    first[t] = present ? max(seen - begin, 0) : kMlstmChunk;
    const double before = from.before[static_cast<std::int64_t>(state) * shape.chunks + chunk];
    carry[t] = present && seen < 0 ? mlstm_weight(row, before) : 0.0F;
    const bool written = present && begin + t >= from.first[begin + length - 1];
    write[t] = written ? mlstm_weight(from.row[at + length - 1], column) : 0.0F;
  }

  // Of the weight of token j in the read of token t.
  __device__ float exponent(int t, int j) const {
    return (row_high[t] + column_high[j]) + (row_low[t] + column_low[j]);
  }

  __device__ bool sees(int t, int j) const { return j <= t && j >= first[t]; }

  // An infinite gate leaves no rest.
  __device__ static float rest_of(double x, float high) {
    return isinf(high) ? 0.0F : static_cast<float>(x - static_cast<double>(high));
  }
};

// Fills the scalars for inputs.initial.m (natural, [states]) or, where null, an empty state.
MlstmScalars scan_mlstm_gates(CudaStream& stream,
                              DeviceScratch& scratch,
                              const MlstmShape& shape,
                              const MlstmInputs& inputs);

// States and their gradients between chunks: float32 [chunks, states, state_size].
struct MlstmScanTargets {
  const float* start_c;  // of the first state in the scan's direction; null: zero
  const float* start_n;
  float* end_c;  // of the last one; null: not wanted
  float* end_n;
};

// Turns each chunk's own sum into the state before it; the end is stored at the scale of m as
// float32 rounds it.
void scan_mlstm_states(CudaStream& stream,
                       const MlstmShape& shape,
                       const MlstmScalars& scalars,
                       float* x,
                       const MlstmScanTargets& targets);

// Turns each chunk's own gradient into that of the state after it; the start is at the rounded
// scale, the end is the gradient of the state before the first chunk.
void scan_mlstm_gradients(CudaStream& stream,
                          const MlstmShape& shape,
                          const MlstmScalars& scalars,
                          float* d_x,
                          const MlstmScanTargets& targets);

// m after the last token and, where wanted, the total log decay of each state, rounded.
void store_mlstm_scalars(
    CudaStream& stream, const MlstmScalars& scalars, int states, float* m, float* decay);

// MlstmGradientSummarise's factors; alone: the scalars of the same tokens after an empty state.
void store_mlstm_factor(CudaStream& stream,
                        const MlstmScalars& scalars,
                        const MlstmScalars& alone,
                        int states,
                        const float* initial_m,
                        float* factor);

// Gradients of log weights, by what the weight spans (gate_gradients_kernel). Kernels that share a
// sum write a part each; parts are added in order.
struct MlstmLogGradients {
  float *through, *written;  // [states, head_parts, tokens]
  float* read;               // [states, read_parts, tokens]
  float* left;               // [states, state_parts, tokens]
  float* passed;             // [states, state_parts, chunks]
  int head_parts, read_parts, state_parts;
};

// Arguments of the kernels between the scans, all on the device. T: float or BFloat16.
template <class T>
struct MlstmArrays {
  MlstmShape shape;
  MlstmScalars scalars;
  const T *q, *k, *v;
  T* h_out;          // forward
  const T *h, *d_h;  // backward
  T *d_q, *d_k, *d_v;
  float* x;    // entering states
  float* d_x;  // gradients of leaving states
  // Of reads, [heads, tokens]: 1 / N and -d_h . h / N.
  float *inverse, *delta;
  MlstmLogGradients logs;
};

// The four stages, on CUDA cores for any width. They want head_parts and read_parts = readers and
// state_parts = 1.
template <class T>
void plain_mlstm_sums(CudaStream& stream, const MlstmArrays<T>& a);
template <class T>
void plain_mlstm_reads(CudaStream& stream, const MlstmArrays<T>& a);
// inverse, delta and each chunk's own gradient of the state before it.
template <class T>
void plain_mlstm_read_gradients(CudaStream& stream, const MlstmArrays<T>& a);
// d_q, d_k, d_v and the gradients of log weights.
template <class T>
void plain_mlstm_gradients(CudaStream& stream, DeviceScratch& scratch, const MlstmArrays<T>& a);

// The same on tensor cores.
// Whether the width has such kernels, the pointers allow 16-byte accesses and the device has the
// shared memory; backward: with all arguments of the backward stages.
bool has_mma_mlstm(const MlstmArrays<BFloat16>& a, bool backward);
// Parts of read and state_parts; head_parts is 1.
int mma_mlstm_parts(int dim);
void mma_mlstm_sums(CudaStream& stream, const MlstmArrays<BFloat16>& a);
void mma_mlstm_reads(CudaStream& stream, const MlstmArrays<BFloat16>& a);
void mma_mlstm_read_gradients(CudaStream& stream, const MlstmArrays<BFloat16>& a);
void mma_mlstm_gradients(CudaStream& stream, const MlstmArrays<BFloat16>& a);

// The forward pass by Hopper's own instructions, states and all: whether kernels, device, width and
// pointers allow it; the same result within rounding.
bool has_hopper_mlstm(const MlstmArrays<BFloat16>& a);
void hopper_mlstm_forward(CudaStream& stream,
                          const MlstmArrays<BFloat16>& a,
                          const MlstmScanTargets& targets);

// d_i_gate and d_f_gate from the gradients of log weights.
void mlstm_gate_gradients(CudaStream& stream,
                          const MlstmShape& shape,
                          const MlstmLogGradients& logs,
                          const MlstmBackward& op);

}  // namespace bifocal
