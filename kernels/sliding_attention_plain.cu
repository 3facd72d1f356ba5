// Sliding attention without tensor cores, for any type and head width: a warp holds one query, or
// one key of the backward pass, and takes its partners 32 at a time, one to a lane.
#include "core/error.h"
#include "kernels/launch.cuh"
#include "kernels/sliding_attention.cuh"
#include "kernels/tensor_core.cuh"

namespace bifocal {
namespace {

constexpr int kWarps = 4;  // of a block
constexpr int kThreads = 32 * kWarps;
constexpr int kMaxDim = 512;  // five rows of float32 for each warp in 48 KiB

// A warp's part of the block's shared memory, `floats` long.
__device__ float* warp_memory(int floats) {
  return reinterpret_cast<float*>(dynamic_shared()) + warp_id() * floats;
}

template <class T>
__device__ float dot(const float* a, const T* b, int dim) {
  float sum = 0.0F;
#pragma unroll 4
  for (int i = 0; i < dim; ++i) {
    sum += a[i] * load_float(b[i]);
  }
  return sum;
}

// One query as it takes keys. Rows lie in the warp's shared memory.
struct ForwardRow {
  int kv_head;
  float largest, sum;  // of exp(logit - largest)
  const float* q;      // [dim]
  float* out;          // [dim]: sum of exp(logit - largest) v
  float* weights;      // [32], scratch
};

// Adds the keys of `span`.
template <class T>
__device__ void add_keys(
    const AttentionArgs<T>& a, KeySpan span, const T* k, const T* v, ForwardRow& row) {
  const int lane = lane_id();
  for (int first = span.begin; first < span.end; first += 32) {
    const int count = min(32, span.end - first);
    float logit = -INFINITY;
    if (lane < count) {
      logit = a.scale * dot(row.q, k + a.key_row(row.kv_head, first + lane) * a.dim, a.dim);
    }
    const float largest = fmaxf(row.largest, warp_max(logit));
    const float factor = expf(row.largest - largest);
    const float weight = expf(logit - largest);
    row.sum = row.sum * factor + warp_sum(weight);
    row.largest = largest;
    row.weights[lane] = weight;
    __syncwarp();
    for (int i = lane; i < a.dim; i += 32) {
      float sum = row.out[i] * factor;
#pragma unroll 4
      for (int j = 0; j < count; ++j) {
        sum += row.weights[j] * load_float(v[a.key_row(row.kv_head, first + j) * a.dim + i]);
      }
      row.out[i] = sum;
    }
    __syncwarp();
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const AttentionArgs<T> a, T* out, float* lse) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp_id();
  if (row >= static_cast<std::int64_t>(a.tokens) * a.heads) {
    return;
  }
  const int token = static_cast<int>(row / a.heads);
  const int head = static_cast<int>(row % a.heads);
  const int kv_head = head / a.group;
  float* q = warp_memory(2 * a.dim + 32);
  float* sum = q + a.dim;
  for (int i = lane_id(); i < a.dim; i += 32) {
    q[i] = load_float(a.q[row * a.dim + i]);
    sum[i] = 0.0F;
  }
  __syncwarp();
  ForwardRow state{kv_head, -INFINITY, 0.0F, q, sum, sum + a.dim};
  if (a.sink != nullptr) {
    state.largest = load_float(a.sink[head]);
    state.sum = 1.0F;
  }
  if (a.pinned_k != nullptr) {
    add_keys(a, pinned_span(a, token), a.pinned_k, a.pinned_v, state);
  }
  add_keys(a, window_span(a, token), a.k, a.v, state);
  const float factor = 1.0F / state.sum;
  for (int i = lane_id(); i < a.dim; i += 32) {
    out[row * a.dim + i] = store_as<T>(sum[i] * factor);
  }
  if (lane_id() == 0) {
    lse[row] = state.largest + logf(state.sum);
  }
}

// One query of the backward pass. Rows lie in the warp's shared memory.
struct BackwardRow {
  int kv_head;
  float lse, delta;
  const float *q, *d_out;  // [dim]
  float* d_q;              // [dim]
  float* d_logits;         // [32], scratch
};

// Adds dz k over the keys of `span` to d_q.
template <class T>
__device__ void add_query_gradient(
    const AttentionArgs<T>& a, KeySpan span, const T* k, const T* v, const BackwardRow& row) {
  const int lane = lane_id();
  for (int first = span.begin; first < span.end; first += 32) {
    const int count = min(32, span.end - first);
    float d_logit = 0.0F;
    if (lane < count) {
      const std::int64_t at = a.key_row(row.kv_head, first + lane) * a.dim;
      const float probability = expf(a.scale * dot(row.q, k + at, a.dim) - row.lse);
      d_logit = probability * (dot(row.d_out, v + at, a.dim) - row.delta);
    }
    row.d_logits[lane] = d_logit;
    __syncwarp();
    for (int i = lane; i < a.dim; i += 32) {
      float sum = row.d_q[i];
#pragma unroll 4
      for (int j = 0; j < count; ++j) {
        sum += row.d_logits[j] * load_float(k[a.key_row(row.kv_head, first + j) * a.dim + i]);
      }
      row.d_q[i] = sum;
    }
    __syncwarp();
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    query_gradient_kernel(const AttentionArgs<T> a, const AttentionGradients<T> g) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp_id();
  if (row >= static_cast<std::int64_t>(a.tokens) * a.heads) {
    return;
  }
  const int token = static_cast<int>(row / a.heads);
  const int kv_head = static_cast<int>(row % a.heads) / a.group;
  float* q = warp_memory(3 * a.dim + 32);
  float* d_out = q + a.dim;
  float* d_q = d_out + a.dim;
  for (int i = lane_id(); i < a.dim; i += 32) {
    q[i] = load_float(a.q[row * a.dim + i]);
    d_out[i] = load_float(g.d_out[row * a.dim + i]);
    d_q[i] = 0.0F;
  }
  __syncwarp();
  const BackwardRow state{kv_head, g.lse[row], g.delta[row], q, d_out, d_q, d_q + a.dim};
  if (a.pinned_k != nullptr) {
    add_query_gradient(a, pinned_span(a, token), a.pinned_k, a.pinned_v, state);
  }
  add_query_gradient(a, window_span(a, token), a.k, a.v, state);
  for (int i = lane_id(); i < a.dim; i += 32) {
    g.d_q[row * a.dim + i] = store_as<T>(a.scale * d_q[i]);
  }
}

// The gradients of one key: sums over the packed rows that see it, in order.
template <class T, bool kPinned>
__global__ void __launch_bounds__(kThreads)
    key_gradient_kernel(const AttentionArgs<T> a, const AttentionGradients<T> g) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp_id();
  const int keys = kPinned ? a.pinned : a.keys;
  if (at >= static_cast<std::int64_t>(keys) * a.kv_heads) {
    return;
  }
  const int lane = lane_id();
  const int key = static_cast<int>(at / a.kv_heads);
  const int kv_head = static_cast<int>(at % a.kv_heads);
  float* k = warp_memory(4 * a.dim + 64);
  float* v = k + a.dim;
  float* d_k = v + a.dim;
  float* d_v = d_k + a.dim;
  float* probabilities = d_v + a.dim;
  float* d_logits = probabilities + 32;
  for (int i = lane; i < a.dim; i += 32) {
    k[i] = load_float((kPinned ? a.pinned_k : a.k)[at * a.dim + i]);
    v[i] = load_float((kPinned ? a.pinned_v : a.v)[at * a.dim + i]);
    d_k[i] = 0.0F;
    d_v[i] = 0.0F;
  }
  __syncwarp();
  // Tokens [key - own, last) see a key of the window; which ones see a pinned key is looked up.
  const int begin = kPinned ? 0 : max(0, key - a.own()) * a.group;
  const int end = (kPinned ? a.tokens : warp_upper_bound(a.key_begin, a.tokens, key)) * a.group;
  for (int first = begin; first < end; first += 32) {
    const int count = min(32, end - first);
    bool visible = lane < count;
    if (kPinned && visible) {
      visible = pinned_span(a, (first + lane) / a.group).contains(key);
    }
    if (!__any_sync(0xffffffffU, visible)) {
      continue;
    }
    float probability = 0.0F;
    float d_logit = 0.0F;
    if (visible) {
      const std::int64_t row = a.query_row(kv_head, first + lane);
      probability = expf(a.scale * dot(k, a.q + row * a.dim, a.dim) - g.lse[row]);
      d_logit = probability * (dot(v, g.d_out + row * a.dim, a.dim) - g.delta[row]);
    }
    probabilities[lane] = probability;
    d_logits[lane] = d_logit;
    __syncwarp();
    for (int i = lane; i < a.dim; i += 32) {
      float sum_k = d_k[i];
      float sum_v = d_v[i];
#pragma unroll 4
      for (int j = 0; j < count; ++j) {
        const std::int64_t from = a.query_row(kv_head, first + j) * a.dim + i;
        sum_k += d_logits[j] * load_float(a.q[from]);
        sum_v += probabilities[j] * load_float(g.d_out[from]);
      }
      d_k[i] = sum_k;
      d_v[i] = sum_v;
    }
    __syncwarp();
  }
  for (int i = lane; i < a.dim; i += 32) {
    (kPinned ? g.d_pinned_k : g.d_k)[at * a.dim + i] = store_as<T>(a.scale * d_k[i]);
    (kPinned ? g.d_pinned_v : g.d_v)[at * a.dim + i] = store_as<T>(d_v[i]);
  }
}

// One warp for each of `items`, with `floats` of shared memory.
template <class... Parameters, class... Arguments>
void launch_warps(CudaStream& stream,
                  std::int64_t items,
                  int floats,
                  void (*kernel)(Parameters...),
                  const Arguments&... arguments) {
  if (items > 0) {
    const int bytes = kWarps * floats * static_cast<int>(sizeof(float));
    launch_kernel(stream, grid_of(ceil_div(items, kWarps)), kThreads, bytes, kernel, arguments...);
  }
}

template <class T>
void require_dim(const AttentionArgs<T>& a) {
  BIFOCAL_REQUIRE(a.dim <= kMaxDim,
                  "[sliding_attention] wanted a head width up to {}, got {}: a wider head needs a "
                  "kernel of its own",
                  kMaxDim,
                  a.dim);
}

}  // namespace

template <class T>
void attend_plain(CudaStream& stream, const AttentionArgs<T>& a, T* out, float* lse) {
  require_dim(a);
  const std::int64_t rows = static_cast<std::int64_t>(a.tokens) * a.heads;
  launch_warps(stream, rows, 2 * a.dim + 32, forward_kernel<T>, a, out, lse);
}

template <class T>
void differentiate_plain(CudaStream& stream,
                         const AttentionArgs<T>& a,
                         const AttentionGradients<T>& g) {
  require_dim(a);
  const std::int64_t rows = static_cast<std::int64_t>(a.tokens) * a.heads;
  const std::int64_t keys = static_cast<std::int64_t>(a.keys) * a.kv_heads;
  const std::int64_t pinned = static_cast<std::int64_t>(a.pinned) * a.kv_heads;
  launch_warps(stream, rows, 3 * a.dim + 32, query_gradient_kernel<T>, a, g);
  launch_warps(stream, keys, 4 * a.dim + 64, key_gradient_kernel<T, false>, a, g);
  launch_warps(stream, pinned, 4 * a.dim + 64, key_gradient_kernel<T, true>, a, g);
}

template void attend_plain(CudaStream&, const AttentionArgs<float>&, float*, float*);
template void attend_plain(CudaStream&, const AttentionArgs<BFloat16>&, BFloat16*, float*);
template void differentiate_plain(CudaStream&,
                                  const AttentionArgs<float>&,
                                  const AttentionGradients<float>&);
template void differentiate_plain(CudaStream&,
                                  const AttentionArgs<BFloat16>&,
                                  const AttentionGradients<BFloat16>&);

}  // namespace bifocal
