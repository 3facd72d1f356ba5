// Norms, rotary positions, cache writes and softmax features of one token's heads: a block for each
// head of each row. A feature map's matrix is read once, its first rows before the kernel before
// has ended; the rest goes to the L2 cache then.
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
constexpr int kBlocksOfProcessor = 2;  // and room for a block of the kernel before
constexpr int kMostRows = 64;          // of a launch; their pointers fit the kernel's parameters

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

// Every warp alike: the largest of `count` numbers in shared memory.
__device__ inline float largest_of(const float* x, int count) {
  float largest = -INFINITY;
  for (int i = lane_id(); i < count; i += kWarp) {
    largest = fmaxf(largest, x[i]);
  }
  return warp_max(largest);
}

__device__ inline float sum_of_exponentials(const float* x, int count, float largest) {
  float sum = 0.0F;
  for (int i = lane_id(); i < count; i += kWarp) {
    sum += expf(x[i] - largest);
  }
  return warp_sum(sum);
}

// Numbers i and i + dim / 2 of a head in thread i, through norm and rotation. Weights and angles
// are there before the kernel before has ended.
class HeadPair {
 public:
  template <class T, class W>
  __device__ HeadPair(const HeadsArgs<T, W>& a, const T* norm, int row)
      : half_(a.dim / 2), i_(static_cast<int>(threadIdx.x)), is_mine_(i_ < half_) {
    if (!is_mine_) {
      return;
    }
    cos_ = a.cos[static_cast<std::int64_t>(row) * half_ + i_];
    sin_ = a.sin[static_cast<std::int64_t>(row) * half_ + i_];
    if (norm != nullptr) {
      norm_x_ = load_float(norm[i_]);
      norm_y_ = load_float(norm[i_ + half_]);
    }
  }

  // `rotated` [dim] is in shared memory, rounded to T. Ends with a barrier.
  template <class T>
  __device__ void rotate(const T* from, bool is_normed, float eps, float* rotated) {
    __shared__ float squares[kWarps];
    float x = is_mine_ ? load_float(from[i_]) : 0.0F;
    float y = is_mine_ ? load_float(from[i_ + half_]) : 0.0F;
    if (is_normed) {
      const float own = warp_sum(x * x + y * y);
      if (lane_id() == 0) {
        squares[warp_id()] = own;
      }
      __syncthreads();
      float sum = 0.0F;
#pragma unroll
      for (int warp = 0; warp < kMostDim / 2 / kWarp; ++warp) {
        sum += squares[warp];
      }
      const float inverse_rms = rsqrtf(sum / static_cast<float>(2 * half_) + eps);
      x = x * inverse_rms * norm_x_;
      y = y * inverse_rms * norm_y_;
    }
    if (is_mine_) {
      rotated[i_] = load_float(store_as<T>(x * cos_ - y * sin_));
      rotated[i_ + half_] = load_float(store_as<T>(y * cos_ + x * sin_));
    }
    __syncthreads();
  }

 private:
  int half_, i_;
  bool is_mine_;
  float cos_ = 0.0F;
  float sin_ = 0.0F;
  float norm_x_ = 1.0F;
  float norm_y_ = 1.0F;
};

// Rows of a feature map's matrix over the block: kLanes lanes share a row, which they take in one
// 16-byte load each. Fewer lanes than a warp's share several rows.
template <class W, int kLanes>
struct MapRows {
  static constexpr int kTogether = kThreads / kLanes;
  // Loads of a thread under way: all rows of the widths that are common, half of the widest.
  static constexpr int kAhead = kLanes <= 8 ? 1 : (kLanes == 16 || sizeof(W) > 2 ? 4 : 8);
  static constexpr int kWide = Packed<W>::kSize;

  int row = static_cast<int>(threadIdx.x) / kLanes;
  int lane = static_cast<int>(threadIdx.x) % kLanes;
  Packed<W> piece[kAhead];

  const __device__ W* place(const W* weight, int dim, int at) const {
    return weight + static_cast<std::int64_t>(at) * dim + lane * kWide;
  }

  __device__ bool has(int dim, int at) const { return at < dim && lane * kWide < dim; }

  // The first rows; those after them come as far as the L2 cache.
  __device__ void load_first(const W* weight, int dim) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int at = u * kTogether + row;
      piece[u] = has(dim, at) ? load_packed(place(weight, dim, at), 0) : Packed<W>{};
    }
    for (int at = kAhead * kTogether + row; at < dim; at += kTogether) {
      if (has(dim, at)) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(place(weight, dim, at)));
      }
    }
  }

  // Logits of the rows at hand, from `first` on. A row's successor is loaded where it was.
  __device__ void dot(const W* weight, const float* x, int dim, int first, float* logits) {
    float inputs[kWide];
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const int at = lane * kWide + i;
      inputs[i] = at < dim ? x[at] : 0.0F;
    }
    float sums[kAhead] = {};
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        sums[u] = fmaf(piece[u][i], inputs[i], sums[u]);
      }
      const int next = first + (kAhead + u) * kTogether + row;
      if (has(dim, next)) {
        piece[u] = load_packed(place(weight, dim, next), 0);
      }
    }
    const float sum = sums_over_lanes<kLanes>(sums);
    constexpr int kSame = kLanes / kAhead;  // lanes with one sum
    const int at = first + lane / kSame * kTogether + row;
    if (lane % kSame == 0 && at < dim) {
      logits[at] = sum;
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

// Where a block's head lies. Query heads come first, then states with the key head that they read.
struct HeadBlock {
  int row, head, state, states_of_key;
  bool is_query;
  std::int64_t at;   // the head's first number among the rows' queries, or keys and values
  std::int64_t out;  // the same among features

  template <class T, class W>
  __device__ explicit HeadBlock(const HeadsArgs<T, W>& a)
      : row(static_cast<int>(blockIdx.y)),
        head(static_cast<int>(blockIdx.x)),
        state(head - a.heads),
        states_of_key(a.states / a.kv_heads),
        is_query(head < a.heads) {
    const int key_head = is_query ? 0 : state / states_of_key;
    at = is_query ? (static_cast<std::int64_t>(row) * a.heads + head) * a.dim
                  : (static_cast<std::int64_t>(row) * a.kv_heads + key_head) * a.dim;
    out = is_query ? at : (static_cast<std::int64_t>(row) * a.states + state) * a.dim;
  }
};

// A rotated query, or a key and its value into the caches.
template <class T, class W>
__device__ void store_head(const HeadsArgs<T, W>& a, const HeadBlock& b, const float* rotated) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= a.dim) {
    return;
  }
  if (b.is_query) {
    a.q[b.at + i] = store_as<T>(rotated[i]);
  } else if (a.places != nullptr && b.state % b.states_of_key == 0) {
    const std::int64_t width = static_cast<std::int64_t>(a.kv_heads) * a.dim;
    const std::int64_t at =
        a.places[b.row] * width + static_cast<std::int64_t>(b.state / b.states_of_key) * a.dim + i;
    a.k_cache[b.row][at] = store_as<T>(rotated[i]);
    a.v_cache[b.row][at] = a.v[b.at + i];
  }
}

// Block (head, row). kLanes 0: any width.
template <class T, class W, int kLanes>
__global__ void __launch_bounds__(kThreads, kBlocksOfProcessor)
    heads_kernel(const __grid_constant__ HeadsArgs<T, W> a) {
  static_assert(kMostDim <= kThreads);
  __shared__ float logits[kMostDim];
  __shared__ __align__(16) float rotated[kMostDim];
  const HeadBlock b(a);
  const W* weight = b.is_query ? a.feature_q_weight : a.feature_k_weight;
  if (weight != nullptr) {
    weight += static_cast<std::int64_t>(b.is_query ? b.head : b.state) * a.dim * a.dim;
  }
  MapRows<W, kLanes == 0 ? 1 : kLanes> rows;
  if (kLanes > 0 && weight != nullptr) {
    rows.load_first(weight, a.dim);
  }
  const T* norm = b.is_query ? a.q_norm : a.k_norm;
  HeadPair pair(a, norm, b.row);
  wait_for_kernel_before();
  let_kernel_after_start();
  pair.rotate((b.is_query ? a.projected_q : a.projected_k) + b.at, norm != nullptr, a.eps, rotated);
  store_head(a, b, rotated);
  if (weight == nullptr) {
    return;
  }
  if constexpr (kLanes == 0) {
    plain_map(weight, rotated, a.dim, logits);
  } else {
    for (int first = 0; first < a.dim; first += rows.kAhead * rows.kTogether) {
      rows.dot(weight, rotated, a.dim, first, logits);
    }
  }
  __syncthreads();
  const int i = static_cast<int>(threadIdx.x);
  if (i - lane_id() >= a.dim) {  // a whole warp
    return;
  }
  const float largest = largest_of(logits, a.dim);
  const float factor = 1.0F / sum_of_exponentials(logits, a.dim, largest);
  if (i < a.dim) {
    (b.is_query ? a.feature_q : a.feature_k)[b.out + i] =
        store_as<T>(expf(logits[i] - largest) * factor);
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
