// One query per row over that row's cache. The slots of a row are cut into splits, one to a block,
// so that few rows fill the device; a second kernel joins the splits in their order. How a row is
// cut depends on its own number of slots alone, and so do the bits of its result.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/error.h"
#include "kernels/device_scratch.h"
#include "kernels/launch.cuh"
#include "kernels/tensor_core.cuh"
#include "kernels/warp.cuh"
#include "ops/decode_attention.h"

namespace bifocal {
namespace {

constexpr const char* kWhere = "decode_attention";
constexpr int kThreads = 128;
constexpr int kTile = 64;        // slots whose logits a block holds at once
constexpr int kMostSplits = 64;  // of a row
constexpr int kHeads = 4;        // query heads of a block, of one key-value head
constexpr int kKeyLanes = 8;     // threads that share a key
constexpr int kMostDim = 512;
constexpr int kRowsOfLaunch = 64;  // their pointers fit the kernel's parameters

// Slots of one split: a multiple of a tile, such that kMostSplits are enough.
__host__ __device__ std::int64_t split_slots(std::int64_t slots) {
  const std::int64_t tiles = (slots + kTile - 1) / kTile;
  const std::int64_t tiles_of_split = (tiles + kMostSplits - 1) / kMostSplits;
  return kTile * (tiles_of_split > 1 ? tiles_of_split : 1);
}

__host__ __device__ int num_splits(std::int64_t slots) {
  return static_cast<int>((slots + split_slots(slots) - 1) / split_slots(slots));
}

template <class T>
struct DecodeRows {
  const T* k[kRowsOfLaunch];
  const T* v[kRowsOfLaunch];
  std::int64_t slots[kRowsOfLaunch];
};

template <class T>
struct DecodeArgs {
  const T *q, *sink;
  T* out;
  float*
      partial;  // [rows, heads, splits, dim + 2]: sum exp(logit - m) v, then m and the sum of exp
  int heads, kv_heads, group, dim, splits;
  float scale;

  __device__ float* partial_of(int row, int head, int split) const {
    const std::int64_t at = (static_cast<std::int64_t>(row) * heads + head) * splits + split;
    return partial + at * (dim + 2);
  }
};

// How a block's threads share the values of a tile: kLanes side by side, kGroups take every
// kGroups-th slot.
template <int N>
struct ValueThreads {
  static constexpr int kLanes = N == 1 ? 32 : 16;
  static constexpr int kGroups = kThreads / kLanes;
};

// What a block keeps in shared memory.
template <int N>
struct DecodeMemory {
  float *q, *sum;                   // [kHeads, dim], [groups of value threads, kHeads, dim]
  float* logits;                    // [kHeads, kTile], then exp(logit - largest)
  float *largest, *factor, *total;  // [kHeads]; factor = exp(largest before - largest)

  __host__ __device__ static int floats(int dim) {
    return kHeads * (dim * (1 + ValueThreads<N>::kGroups) + kTile + 3);
  }

  __device__ explicit DecodeMemory(int dim)
      : q(reinterpret_cast<float*>(dynamic_shared())),
        sum(q + kHeads * dim),
        logits(sum + ValueThreads<N>::kGroups * kHeads * dim),
        largest(logits + kHeads * kTile),
        factor(largest + kHeads),
        total(factor + kHeads) {}
};

// logits of up to kTile keys; -infinity past `count`.
template <class T, int N>
__device__ void take_keys(const DecodeArgs<T>& a,
                          const DecodeMemory<N>& memory,
                          const T* k,
                          int count) {
  constexpr int kUnroll = N == 1 ? 1 : 2;  // scalar accesses run out of registers
  const std::int64_t stride = static_cast<std::int64_t>(a.kv_heads) * a.dim;
  const int lane = static_cast<int>(threadIdx.x % kKeyLanes);
#pragma unroll kUnroll
  for (int slot = static_cast<int>(threadIdx.x / kKeyLanes); slot < kTile;
       slot += kThreads / kKeyLanes) {
    float sums[kHeads] = {};
    if (slot < count) {
#pragma unroll 2
      for (int i = lane; i < a.dim / N; i += kKeyLanes) {
        const auto key = load_vector<N>(k + slot * stride, i);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const auto query = load_vector<N>(memory.q + h * a.dim, i);
#pragma unroll
          for (int j = 0; j < N; ++j) {
            sums[h] += query.element[j] * load_float(key.element[j]);
          }
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      sums[h] = warp_sum<kKeyLanes>(sums[h]);
      if (lane == 0) {
        memory.logits[h * kTile + slot] = slot < count ? a.scale * sums[h] : -INFINITY;
      }
    }
  }
}

// Warp h turns head h's logits into exp(logit - largest).
template <int N>
__device__ void update_softmax(const DecodeMemory<N>& memory) {
  static_assert(kThreads == 32 * kHeads && kTile == 64);
  const int h = static_cast<int>(threadIdx.x / 32);
  float* logits = memory.logits + h * kTile + threadIdx.x % 32;
  float largest = warp_max(fmaxf(logits[0], logits[32]));
  const float before = memory.largest[h];
  largest = fmaxf(largest, before);
  logits[0] = expf(logits[0] - largest);
  logits[32] = expf(logits[32] - largest);
  float sum = logits[0] + logits[32];
  sum = warp_sum(sum);
  __syncwarp();  // all lanes have read the largest of before
  if (threadIdx.x % 32 == 0) {
    const float factor = expf(before - largest);
    memory.largest[h] = largest;
    memory.factor[h] = factor;
    memory.total[h] = memory.total[h] * factor + sum;
  }
}

template <class T, int N>
__device__ void take_values(const DecodeArgs<T>& a,
                            const DecodeMemory<N>& memory,
                            const T* v,
                            int count) {
  using Threads = ValueThreads<N>;
  constexpr int kUnroll = N == 1 ? 1 : 4;
  const std::int64_t stride = static_cast<std::int64_t>(a.kv_heads) * a.dim;
  const int group = static_cast<int>(threadIdx.x) / Threads::kLanes;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) % Threads::kLanes; i < a.dim / N;
       i += Threads::kLanes) {
    float sums[kHeads][N] = {};
#pragma unroll kUnroll
    for (int slot = group; slot < count; slot += Threads::kGroups) {
      const auto value = load_vector<N>(v + slot * stride, i);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float weight = memory.logits[h * kTile + slot];
#pragma unroll
        for (int j = 0; j < N; ++j) {
          sums[h][j] += weight * load_float(value.element[j]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float* to = memory.sum + (group * kHeads + h) * a.dim + i * N;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        to[j] = to[j] * memory.factor[h] + sums[h][j];
      }
    }
  }
}

// Block (split, heads, row): kHeads query heads of a key-value head over one split.
template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    split_kernel(const DecodeArgs<T> a, const __grid_constant__ DecodeRows<T> rows) {
  const int row = static_cast<int>(blockIdx.z);
  const int split = static_cast<int>(blockIdx.x);
  const int parts = (a.group + kHeads - 1) / kHeads;  // blocks of a key-value head
  const int kv_head = static_cast<int>(blockIdx.y) / parts;
  const int first_head = kv_head * a.group + static_cast<int>(blockIdx.y) % parts * kHeads;
  const int heads = min(kHeads, (kv_head + 1) * a.group - first_head);
  const std::int64_t slots = rows.slots[row];
  const std::int64_t length = split_slots(slots);
  const std::int64_t begin = split * length;
  const std::int64_t end = begin + length < slots ? begin + length : slots;
  if (begin >= end) {
    return;
  }
  const DecodeMemory<N> memory(a.dim);
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t query = (static_cast<std::int64_t>(row) * a.heads + first_head) * a.dim;
  for (int i = thread; i < kHeads * a.dim; i += kThreads) {
    memory.q[i] = i < heads * a.dim ? load_float(a.q[query + i]) : 0.0F;
  }
  for (int i = thread; i < ValueThreads<N>::kGroups * kHeads * a.dim; i += kThreads) {
    memory.sum[i] = 0.0F;
  }
  if (thread < kHeads) {
    memory.largest[thread] = -INFINITY;
    memory.total[thread] = 0.0F;
  }
  for (std::int64_t first = begin; first < end; first += kTile) {
    const int count = end - first < kTile ? static_cast<int>(end - first) : kTile;
    const std::int64_t at = (first * a.kv_heads + kv_head) * a.dim;
    __syncthreads();  // memory is set, or the tile before is done with
    take_keys<T, N>(a, memory, rows.k[row] + at, count);
    __syncthreads();
    update_softmax(memory);
    __syncthreads();
    take_values<T, N>(a, memory, rows.v[row] + at, count);
  }
  __syncthreads();
  for (int i = thread; i < heads * a.dim; i += kThreads) {
    float sum = 0.0F;
    for (int group = 0; group < ValueThreads<N>::kGroups; ++group) {
      sum += memory.sum[group * kHeads * a.dim + i];
    }
    a.partial_of(row, first_head + i / a.dim, split)[i % a.dim] = sum;
  }
  if (thread < heads) {
    float* to = a.partial_of(row, first_head + thread, split) + a.dim;
    to[0] = memory.largest[thread];
    to[1] = memory.total[thread];
  }
}

// Block (head, row) joins the splits, and the sink last.
template <class T>
__global__ void __launch_bounds__(kThreads)
    join_kernel(const DecodeArgs<T> a, const __grid_constant__ DecodeRows<T> rows) {
  const int head = static_cast<int>(blockIdx.x);
  const int row = static_cast<int>(blockIdx.y);
  const std::int64_t slots = rows.slots[row];
  T* out = a.out + (static_cast<std::int64_t>(row) * a.heads + head) * a.dim;
  if (slots == 0) {
    for (int i = static_cast<int>(threadIdx.x); i < a.dim; i += kThreads) {
      out[i] = store_as<T>(0.0F);
    }
    return;
  }
  const int splits = num_splits(slots);
  const float* partial = a.partial_of(row, head, 0);
  const int stride = a.dim + 2;
  const float sink = a.sink == nullptr ? -INFINITY : load_float(a.sink[head]);
  float largest = sink;
  for (int split = 0; split < splits; ++split) {
    largest = fmaxf(largest, partial[split * stride + a.dim]);
  }
  float total = 0.0F;
  for (int split = 0; split < splits; ++split) {
    const float* end = partial + split * stride + a.dim;
    total += expf(end[0] - largest) * end[1];
  }
  total += expf(sink - largest);
  for (int i = static_cast<int>(threadIdx.x); i < a.dim; i += kThreads) {
    float sum = 0.0F;
    for (int split = 0; split < splits; ++split) {
      sum += expf(partial[split * stride + a.dim] - largest) * partial[split * stride + i];
    }
    out[i] = store_as<T>(sum / total);
  }
}

template <class T, int N>
void launch_rows(CudaStream& stream, const DecodeArgs<T>& a, const DecodeRows<T>& rows, int count) {
  const auto parts = static_cast<unsigned>(a.kv_heads * ceil_div(a.group, kHeads));
  const auto z = static_cast<unsigned>(count);
  if (a.splits > 0) {
    launch_kernel(stream,
                  dim3(static_cast<unsigned>(a.splits), parts, z),
                  kThreads,
                  DecodeMemory<N>::floats(a.dim) * static_cast<int>(sizeof(float)),
                  split_kernel<T, N>,
                  a,
                  rows);
  }
  launch_kernel(
      stream, dim3(static_cast<unsigned>(a.heads), z), kThreads, 0, join_kernel<T>, a, rows);
}

// Rows [first, first + count) of the op.
template <class T>
void decode_rows(CudaStream& stream, const DecodeAttention& op, std::int64_t first, int count) {
  DecodeRows<T> rows{};
  bool aligned = true;
  int splits = 0;
  for (int i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(first + i);
    rows.k[i] = op.k[at].as<T>();
    rows.v[i] = op.v[at].as<T>();
    rows.slots[i] = op.k[at].shape[0];
    aligned = aligned && is_aligned(16, rows.k[i], rows.v[i]);
    splits = std::max(splits, num_splits(rows.slots[i]));
  }
  const std::int64_t heads = op.q.shape[1];
  const std::int64_t dim = op.q.shape[2];
  const std::int64_t kv_heads = op.k.front().shape[1] / dim;
  DeviceScratch scratch(stream);
  const DecodeArgs<T> args{.q = op.q.as<T>() + first * heads * dim,
                           .sink = op.sink ? op.sink.as<T>() : nullptr,
                           .out = op.out.as<T>() + first * heads * dim,
                           .partial = scratch.take<float>(count * heads * splits * (dim + 2)),
                           .heads = static_cast<int>(heads),
                           .kv_heads = static_cast<int>(kv_heads),
                           .group = static_cast<int>(heads / kv_heads),
                           .dim = static_cast<int>(dim),
                           .splits = splits,
                           .scale = 1.0F / std::sqrt(static_cast<float>(dim))};
  if (aligned && dim % kVectorSize<T> == 0) {
    launch_rows<T, kVectorSize<T>>(stream, args, rows, count);
  } else {
    launch_rows<T, 1>(stream, args, rows, count);
  }
}

// Block i copies row i in units of Unit, unless a later row takes its slot.
template <class Unit>
__global__ void __launch_bounds__(kThreads) cache_write_kernel(Unit* cache,
                                                               const Unit* rows,
                                                               const std::int32_t* slots,
                                                               int count,
                                                               std::int64_t capacity,
                                                               std::int64_t width) {
  const int row = static_cast<int>(blockIdx.x);
  const std::int32_t slot = slots[row];
  int is_taken = slot < 0 || slot >= capacity ? 1 : 0;
  for (int later = row + 1 + static_cast<int>(threadIdx.x); later < count; later += kThreads) {
    is_taken |= slots[later] == slot ? 1 : 0;
  }
  if (__syncthreads_or(is_taken) != 0) {
    return;
  }
  for (std::int64_t i = threadIdx.x; i < width; i += kThreads) {
    cache[slot * width + i] = rows[row * width + i];
  }
}

template <class Unit>
__global__ void __launch_bounds__(kThreads) cache_read_kernel(Unit* rows,
                                                              const Unit* cache,
                                                              const std::int32_t* slots,
                                                              std::int64_t capacity,
                                                              std::int64_t width) {
  const std::int64_t row = blockIdx.x;
  const std::int32_t slot = slots[row];
  const bool is_inside = slot >= 0 && slot < capacity;
  for (std::int64_t i = threadIdx.x; i < width; i += kThreads) {
    rows[row * width + i] = is_inside ? cache[slot * width + i] : Unit{};
  }
}

// Calls function(Unit{}, units of a row) with the widest unit that both tensors allow.
template <class Function>
void dispatch_unit(const void* a, const void* b, std::int64_t row_bytes, Function&& function) {
  if (is_aligned(16, a, b) && row_bytes % 16 == 0) {
    function(uint4{}, row_bytes / 16);
  } else {
    function(static_cast<unsigned char>(0), row_bytes);
  }
}

}  // namespace

void run(CudaStream& stream, const DecodeAttention& op) {
  BIFOCAL_REQUIRE(op.q.shape[2] <= kMostDim,
                  "[{}] wanted a head width up to {}, got {}: a wider head needs a kernel of its "
                  "own",
                  kWhere,
                  kMostDim,
                  op.q.shape[2]);
  const std::int64_t rows = op.q.shape[0];
  dispatch_device(kWhere, op.out.dtype, [&](auto zero) {
    for (std::int64_t first = 0; first < rows; first += kRowsOfLaunch) {
      const auto count = static_cast<int>(std::min<std::int64_t>(kRowsOfLaunch, rows - first));
      decode_rows<decltype(zero)>(stream, op, first, count);
    }
  });
}

void run(CudaStream& stream, const CacheWrite& op) {
  const std::int64_t count = op.rows.shape[0];
  const std::int64_t bytes = op.rows.shape[1] * static_cast<std::int64_t>(size_of(op.rows.dtype));
  if (count == 0) {
    return;
  }
  dispatch_unit(op.cache.data, op.rows.data, bytes, [&](auto zero, std::int64_t width) {
    using Unit = decltype(zero);
    launch_kernel(stream,
                  grid_of(count),
                  kThreads,
                  0,
                  cache_write_kernel<Unit>,
                  static_cast<Unit*>(op.cache.data),
                  static_cast<const Unit*>(op.rows.data),
                  op.slots.as<std::int32_t>(),
                  static_cast<int>(count),
                  op.cache.shape[0],
                  width);
  });
}

void run(CudaStream& stream, const CacheRead& op) {
  const std::int64_t count = op.rows.shape[0];
  const std::int64_t bytes = op.rows.shape[1] * static_cast<std::int64_t>(size_of(op.rows.dtype));
  if (count == 0) {
    return;
  }
  dispatch_unit(op.cache.data, op.rows.data, bytes, [&](auto zero, std::int64_t width) {
    using Unit = decltype(zero);
    launch_kernel(stream,
                  grid_of(count),
                  kThreads,
                  0,
                  cache_read_kernel<Unit>,
                  static_cast<Unit*>(op.rows.data),
                  static_cast<const Unit*>(op.cache.data),
                  op.slots.as<std::int32_t>(),
                  op.cache.shape[0],
                  width);
  });
}

}  // namespace bifocal
