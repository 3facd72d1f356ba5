// Norms, rotary positions, cache writes and softmax features of one token's heads: a block for each
// head of each row. A feature map's matrix is read once, its first rows before the kernel before
// has ended.
#include <algorithm>
#include <cmath>

#include "kernels/dependent.cuh"
#include "kernels/launch.cuh"
#include "kernels/warp.cuh"
#include "ops/decode_layer.h"

namespace bifocal {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMostDim = 512;
constexpr int kMostRows = 64;  // of a launch; their pointers fit the kernel's parameters

template <class T, class W>
struct HeadsArgs {
  T* k_cache[kMostRows];
  T* v_cache[kMostRows];
  const std::int32_t* places;
  T *q, *feature_q, *feature_k;
  const T *projected_q, *projected_k, *v, *q_norm, *k_norm;
  const W *feature_q_weight, *feature_k_weight;
  const float *cos, *sin;
  int heads, kv_heads, states, dim;  // states: blocks of keys; at least kv_heads
  float eps;
};

// Every warp alike: the sum or largest of `count` numbers in shared memory.
__device__ inline float sum_of(const float* x, int count) {
  float sum = 0.0F;
  for (int i = lane_id(); i < count; i += kWarp) {
    sum += x[i];
  }
  return warp_sum(sum);
}

__device__ inline float sum_of_squares(const float* x, int count) {
  float sum = 0.0F;
  for (int i = lane_id(); i < count; i += kWarp) {
    sum += x[i] * x[i];
  }
  return warp_sum(sum);
}

__device__ inline float largest_of(const float* x, int count) {
  float largest = -INFINITY;
  for (int i = lane_id(); i < count; i += kWarp) {
    largest = fmaxf(largest, x[i]);
  }
  return warp_max(largest);
}

// Norm and rotation of a head in shared memory, rounded to T. Ends with a barrier.
template <class T, class W>
__device__ void rotate_head(
    const HeadsArgs<T, W>& a, const T* from, const T* norm, int row, float* raw, float* rotated) {
  const int half = a.dim / 2;
  for (int i = static_cast<int>(threadIdx.x); i < a.dim; i += kThreads) {
    raw[i] = load_float(from[i]);
  }
  __syncthreads();
  const float inverse_rms =
      norm == nullptr ? 1.0F
                      : rsqrtf(sum_of_squares(raw, a.dim) / static_cast<float>(a.dim) + a.eps);
  for (int i = static_cast<int>(threadIdx.x); i < half; i += kThreads) {
    float x = raw[i] * inverse_rms;
    float y = raw[i + half] * inverse_rms;
    if (norm != nullptr) {
      x *= load_float(norm[i]);
      y *= load_float(norm[i + half]);
    }
    const float c = a.cos[static_cast<std::int64_t>(row) * half + i];
    const float s = a.sin[static_cast<std::int64_t>(row) * half + i];
    rotated[i] = load_float(store_as<T>(x * c - y * s));
    rotated[i + half] = load_float(store_as<T>(y * c + x * s));
  }
  __syncthreads();
}

// Rows of a feature map's matrix over the block: kLanes lanes share a row, which they take in one
// 16-byte load each. Fewer lanes than a warp's share several rows.
template <class W, int kLanes>
struct MapRows {
  static constexpr int kTogether = kThreads / kLanes;
  // Loads of a thread under way: all rows of the widths that are common, half of the widest.
  static constexpr int kAhead = kLanes <= 8 ? 1 : (kLanes == 16 || sizeof(W) > 2 ? 4 : 8);

  int row = static_cast<int>(threadIdx.x) / kLanes;
  int lane = static_cast<int>(threadIdx.x) % kLanes;
  Packed<W> piece[kAhead];

  __device__ void load(const W* weight, int dim, int first) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int at = first + u * kTogether + row;
      const bool there = at < dim && lane * Packed<W>::kSize < dim;
      piece[u] =
          there ? load_packed(weight + static_cast<std::int64_t>(at) * dim, lane) : Packed<W>{};
    }
  }

  __device__ void dot(const float* x, int dim, int first, float* logits) {
    float inputs[Packed<W>::kSize];
#pragma unroll
    for (int i = 0; i < Packed<W>::kSize; ++i) {
      const int at = lane * Packed<W>::kSize + i;
      inputs[i] = at < dim ? x[at] : 0.0F;
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      float sum = 0.0F;
#pragma unroll
      for (int i = 0; i < Packed<W>::kSize; ++i) {
        sum = fmaf(piece[u][i], inputs[i], sum);
      }
      sum = warp_sum<kLanes>(sum);
      const int at = first + u * kTogether + row;
      if (lane == 0 && at < dim) {
        logits[at] = sum;
      }
    }
  }
};

// For widths that 16-byte loads do not divide.
template <class W>
__device__ void plain_map(const W* weight, const float* x, int dim, float* logits) {
  for (int at = warp_id(); at < dim; at += kWarps) {
    float sum = 0.0F;
    for (int i = lane_id(); i < dim; i += kWarp) {
      sum = fmaf(load_float(weight[static_cast<std::int64_t>(at) * dim + i]), x[i], sum);
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) {
      logits[at] = sum;
    }
  }
}

// Block (head, row): query heads first, then states with the key head that they read. kLanes 0: any
// width.
template <class T, class W, int kLanes>
__global__ void __launch_bounds__(kThreads)
    heads_kernel(const __grid_constant__ HeadsArgs<T, W> a) {
  __shared__ float raw[kMostDim];
  __shared__ float rotated[kMostDim];
  const int head = static_cast<int>(blockIdx.x);
  const int row = static_cast<int>(blockIdx.y);
  const bool is_query = head < a.heads;
  const int state = head - a.heads;
  const int key_head = is_query ? 0 : state / (a.states / a.kv_heads);
  const W* weight = is_query ? a.feature_q_weight : a.feature_k_weight;
  if (weight != nullptr) {
    weight += static_cast<std::int64_t>(is_query ? head : state) * a.dim * a.dim;
  }
  MapRows<W, kLanes == 0 ? 1 : kLanes> rows;
  if (kLanes > 0 && weight != nullptr) {
    rows.load(weight, a.dim, 0);
  }
  let_kernel_after_start();
  wait_for_kernel_before();
  const std::int64_t query = (static_cast<std::int64_t>(row) * a.heads + head) * a.dim;
  const std::int64_t key = (static_cast<std::int64_t>(row) * a.kv_heads + key_head) * a.dim;
  rotate_head(a,
              is_query ? a.projected_q + query : a.projected_k + key,
              is_query ? a.q_norm : a.k_norm,
              row,
              raw,
              rotated);
  if (is_query) {
    for (int i = static_cast<int>(threadIdx.x); i < a.dim; i += kThreads) {
      a.q[query + i] = store_as<T>(rotated[i]);
    }
  } else if (a.places != nullptr && state % (a.states / a.kv_heads) == 0) {
    const std::int64_t at =
        (static_cast<std::int64_t>(a.places[row]) * a.kv_heads + key_head) * a.dim;
    for (int i = static_cast<int>(threadIdx.x); i < a.dim; i += kThreads) {
      a.k_cache[row][at + i] = store_as<T>(rotated[i]);
      a.v_cache[row][at + i] = a.v[key + i];
    }
  }
  if (weight == nullptr) {
    return;
  }
  float* logits = raw;  // done with
  if constexpr (kLanes == 0) {
    plain_map(weight, rotated, a.dim, logits);
  } else {
    for (int first = 0; first < a.dim; first += rows.kAhead * rows.kTogether) {
      if (first > 0) {
        rows.load(weight, a.dim, first);
      }
      rows.dot(rotated, a.dim, first, logits);
    }
  }
  __syncthreads();
  const float largest = largest_of(logits, a.dim);
  for (int i = static_cast<int>(threadIdx.x); i < a.dim; i += kThreads) {
    rotated[i] = expf(logits[i] - largest);
  }
  __syncthreads();
  const float factor = 1.0F / sum_of(rotated, a.dim);
  T* features = is_query
                    ? a.feature_q + query
                    : a.feature_k + (static_cast<std::int64_t>(row) * a.states + state) * a.dim;
  for (int i = static_cast<int>(threadIdx.x); i < a.dim; i += kThreads) {
    features[i] = store_as<T>(rotated[i] * factor);
  }
}

template <class T, class W>
void launch_heads(CudaStream& stream, const HeadsArgs<T, W>& a, int rows) {
  const dim3 grid(static_cast<unsigned>(a.heads + a.states), static_cast<unsigned>(rows));
  const bool packed =
      a.dim % Packed<W>::kSize == 0 &&
      (a.feature_q_weight == nullptr || is_aligned(16, a.feature_q_weight, a.feature_k_weight));
  const int lanes = packed ? a.dim / Packed<W>::kSize : kWarp + 1;
  if (lanes <= 8) {
    launch_dependent(stream, grid, kThreads, 0, heads_kernel<T, W, 8>, a);
  } else if (lanes <= 16) {
    launch_dependent(stream, grid, kThreads, 0, heads_kernel<T, W, 16>, a);
  } else if (lanes <= kWarp) {
    launch_dependent(stream, grid, kThreads, 0, heads_kernel<T, W, kWarp>, a);
  } else {
    launch_dependent(stream, grid, kThreads, 0, heads_kernel<T, W, 0>, a);
  }
}

template <class T, class W>
void heads_of_rows(CudaStream& stream, const DecodeHeads& op) {
  const std::int64_t rows = op.projected_q.shape[0];
  const std::int64_t heads = op.projected_q.shape[1];
  const std::int64_t dim = op.projected_q.shape[2];
  const std::int64_t kv_heads = op.projected_k.shape[1];
  const std::int64_t states = op.feature_q ? op.feature_k.shape[1] : kv_heads;
  for (std::int64_t first = 0; first < rows; first += kMostRows) {
    const std::int64_t count = std::min<std::int64_t>(kMostRows, rows - first);
    HeadsArgs<T, W> a{};
    if (!op.k_cache.empty()) {
      a.places = op.places.as<std::int32_t>() + first;
      for (std::int64_t i = 0; i < count; ++i) {
        a.k_cache[i] = op.k_cache[static_cast<std::size_t>(first + i)].template as<T>();
        a.v_cache[i] = op.v_cache[static_cast<std::size_t>(first + i)].template as<T>();
      }
    }
    a.q = op.q.as<T>() + first * heads * dim;
    a.projected_q = op.projected_q.as<T>() + first * heads * dim;
    a.projected_k = op.projected_k.as<T>() + first * kv_heads * dim;
    a.v = op.v.as<T>() + first * kv_heads * dim;
    a.q_norm = op.q_norm ? op.q_norm.as<T>() : nullptr;
    a.k_norm = op.k_norm ? op.k_norm.as<T>() : nullptr;
    a.cos = op.cos.as<float>() + first * dim / 2;
    a.sin = op.sin.as<float>() + first * dim / 2;
    if (op.feature_q) {
      a.feature_q = op.feature_q.as<T>() + first * heads * dim;
      a.feature_k = op.feature_k.as<T>() + first * states * dim;
      a.feature_q_weight = op.feature_q_weight.as<W>();
      a.feature_k_weight = op.feature_k_weight.as<W>();
    }
    a.heads = static_cast<int>(heads);
    a.kv_heads = static_cast<int>(kv_heads);
    a.states = static_cast<int>(states);
    a.dim = static_cast<int>(dim);
    a.eps = static_cast<float>(op.eps);
    launch_heads(stream, a, static_cast<int>(count));
  }
}

}  // namespace

void run(CudaStream& stream, const DecodeHeads& op) {
  BIFOCAL_REQUIRE(op.q.shape[2] <= kMostDim,
                  "[decode_heads] wanted heads of width {} or less, got {}",
                  kMostDim,
                  op.q.shape[2]);
  dispatch_device("decode_heads", op.q.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (op.feature_q && op.feature_q_weight.dtype == DType::bf16) {
      heads_of_rows<T, BFloat16>(stream, op);
    } else {
      heads_of_rows<T, T>(stream, op);
    }
  });
}

}  // namespace bifocal
