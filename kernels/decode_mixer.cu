// The mixer of one token in two kernels. The first cuts the work so that few rows fill the device:
// a row's slots into splits, a state into columns. The second joins the splits in their order, adds
// the sink, moves n and m on, and mixes. How a row is cut depends on its own length alone, and so
// do the bits of its result.
#include <algorithm>
#include <cmath>

#include "kernels/dependent.cuh"
#include "kernels/launch.cuh"
#include "kernels/warp.cuh"
#include "ops/decode_layer.h"

namespace bifocal {
namespace {

constexpr const char* kWhere = "decode_mixer";
constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kSplits = static_cast<int>(kDecodeSplits);
constexpr int kLeastSlots = 16;  // of a split
constexpr int kHeads = 4;        // query heads of a near block, of one key-value head
constexpr int kElements = 8;     // of a head that a lane holds
constexpr int kMostDim = kElements * kWarp;
constexpr int kMostRows = 64;  // of a launch; their pointers fit the kernel's parameters
constexpr int kColumns = 16;   // of a state in a far block
constexpr int kColumnLanes = kColumns / 4;
constexpr int kFeatureRows = kThreads / kColumnLanes;  // of a state that a block reads at once
constexpr int kPasses = kMostDim / kFeatureRows;
constexpr float kTiny = 1e-30F;  // added to the normaliser, as everywhere

template <class T>
struct MixerArgs {
  const T* k[kMostRows];
  const T* v[kMostRows];
  const std::int32_t *lengths, *sequences;
  T* y;
  const T *q, *sink, *feature_q, *feature_k, *value;
  const float *i_gate, *f_gate, *gate;
  float *c, *n, *m;
  float* partial;  // [rows, heads, kSplits, dim + 2]: sum exp(logit - m) v, then m, sum of exp
  float* far;      // [rows, heads, dim]
  int heads, kv_heads, states, dim;
  int near_blocks, head_parts;  // of a split: kv_heads * head_parts; parts of a key-value head
  float scale;

  __device__ float* partial_of(int row, int head, int split) const {
    const std::int64_t at = (static_cast<std::int64_t>(row) * heads + head) * kSplits + split;
    return partial + at * (dim + 2);
  }
};

__host__ __device__ inline int split_slots(int slots) {
  const int least = (slots + kSplits - 1) / kSplits;
  return (least + kLeastSlots - 1) / kLeastSlots * kLeastSlots;
}

__host__ __device__ inline int num_splits(int slots) {
  return slots == 0 ? 0 : (slots + split_slots(slots) - 1) / split_slots(slots);
}

// kElements numbers of T as floats; zeros past a head's end.
template <class T>
__device__ void load_lane(float (&to)[kElements], const T* from, bool there) {
  constexpr int kWide = kVectorSize<T>;
#pragma unroll
  for (int part = 0; part < kElements / kWide; ++part) {
    const Packed<T> piece = there ? load_packed(from, part) : Packed<T>{};
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      to[part * kWide + i] = piece[i];
    }
  }
}

// What kLanes lanes know of the slots they have taken, for each of the block's heads.
struct Taken {
  float largest[kHeads], total[kHeads], sum[kHeads][kElements];

  __device__ Taken() {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      largest[h] = -INFINITY;
      total[h] = 0.0F;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        sum[h][i] = 0.0F;
      }
    }
  }

  __device__ void add(int h, float logit, const float (&value)[kElements]) {
    const float next = fmaxf(largest[h], logit);
    const float keep = expf(largest[h] - next);
    const float weight = expf(logit - next);
    largest[h] = next;
    total[h] = total[h] * keep + weight;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      sum[h][i] = sum[h][i] * keep + weight * value[i];
    }
  }
};

// One split of a key-value head's slots for up to kHeads of its query heads. kLanes lanes share a
// slot; each group of lanes has its own sums, which meet at the end.
template <class T, int kLanes>
__device__ void near_part(const MixerArgs<T>& a, int block, int row, float* shared) {
  constexpr int kGroups = kThreads / kLanes;
  const int split = block / (a.kv_heads * a.head_parts);
  const int part = block % (a.kv_heads * a.head_parts);
  const int kv_head = part / a.head_parts;
  const int readers = a.heads / a.kv_heads;
  const int first_head = kv_head * readers + part % a.head_parts * kHeads;
  const int heads = min(kHeads, (kv_head + 1) * readers - first_head);
  const int slots = a.lengths[row];
  const int length = split_slots(slots);
  const int begin = split * length;
  const int end = min(slots, begin + length);
  if (begin >= end) {
    return;
  }
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const bool there = lane * kElements < a.dim;
  const int column = lane * kElements;
  float q[kHeads][kElements];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const std::int64_t at = (static_cast<std::int64_t>(row) * a.heads + first_head + h) * a.dim;
    load_lane(q[h], a.q + at + column, there && h < heads);
  }
  const std::int64_t stride = static_cast<std::int64_t>(a.kv_heads) * a.dim;
  const T* keys = a.k[row] + kv_head * a.dim + column;
  const T* values = a.v[row] + kv_head * a.dim + column;
  Taken taken;
  const int turns = (end - begin + kGroups - 1) / kGroups;  // alike in all lanes: they shuffle
#pragma unroll 2
  for (int turn = 0; turn < turns; ++turn) {
    const int slot = begin + turn * kGroups + group;
    const bool is_slot = slot < end;
    float key[kElements];
    float value[kElements];
    load_lane(key, keys + slot * stride, there && is_slot);
    load_lane(value, values + slot * stride, there && is_slot);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float logit = 0.0F;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        logit = fmaf(q[h][i], key[i], logit);
      }
      logit = warp_sum<kLanes>(logit) * a.scale;
      if (is_slot) {
        taken.add(h, logit, value);
      }
    }
  }
  // [kGroups, kHeads] largest logits and totals, then [kGroups, dim] sums of a head at a time.
  float* largest = shared;
  float* totals = shared + kGroups * kHeads;
  float* sums = shared + 2 * kGroups * kHeads;
  if (lane == 0) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      largest[group * kHeads + h] = taken.largest[h];
      totals[group * kHeads + h] = taken.total[h];
    }
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h >= heads) {
      break;
    }
    float most = -INFINITY;
    for (int g = 0; g < kGroups; ++g) {
      most = fmaxf(most, largest[g * kHeads + h]);
    }
    const float factor = expf(taken.largest[h] - most);  // 0 where a group took no slot
    if (there) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        sums[group * a.dim + column + i] = taken.sum[h][i] * factor;
      }
    }
    __syncthreads();
    float* to = a.partial_of(row, first_head + h, split);
    for (int i = static_cast<int>(threadIdx.x); i < a.dim; i += kThreads) {
      float sum = 0.0F;
      for (int g = 0; g < kGroups; ++g) {
        sum += sums[g * a.dim + i];
      }
      to[i] = sum;
    }
    if (threadIdx.x == 0) {
      float total = 0.0F;
      for (int g = 0; g < kGroups; ++g) {
        total += expf(largest[g * kHeads + h] - most) * totals[g * kHeads + h];
      }
      to[a.dim] = most;
      to[a.dim + 1] = total;
    }
    __syncthreads();
  }
}

// Factors of the old state and of the new product. The new m is rounded before it is used, so that
// C and n stand at the scale of the m that is stored.
struct StepGates {
  float forget, input, m;

  __device__ StepGates(float i_gate, float f_gate, float before) {
    const auto f = static_cast<double>(f_gate);
    const double carried = fmin(f, 0.0) - log1p(exp(-fabs(f))) + static_cast<double>(before);
    const auto i = static_cast<double>(i_gate);
    m = static_cast<float>(fmax(carried, i));
    forget = static_cast<float>(exp(carried - static_cast<double>(m)));
    input = static_cast<float>(exp(i - static_cast<double>(m)));
  }
};

// Sums over the feature rows of each warp: of the state's columns for up to kHeads readers, and of
// q n.
template <class T>
__device__ void read_state(const MixerArgs<T>& a,
                           const float4 (&state)[kPasses],
                           const float* q,
                           const float* n,
                           int readers,
                           float* sums,
                           float* products) {
  const int lane = static_cast<int>(threadIdx.x) % kColumnLanes;
  const int first_row = static_cast<int>(threadIdx.x) / kColumnLanes;
  const int warp = warp_id();
#pragma unroll
  for (int reader = 0; reader < kHeads; ++reader) {
    if (reader >= readers) {
      break;
    }
    float4 sum{};
    float product = 0.0F;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int feature = pass * kFeatureRows + first_row;
      if (feature < a.dim) {
        const float weight = q[reader * a.dim + feature];
        sum.x = fmaf(weight, state[pass].x, sum.x);
        sum.y = fmaf(weight, state[pass].y, sum.y);
        sum.z = fmaf(weight, state[pass].z, sum.z);
        sum.w = fmaf(weight, state[pass].w, sum.w);
        product = fmaf(weight, n[feature], product);
      }
    }
#pragma unroll
    for (int distance = kColumnLanes; distance < kWarp; distance *= 2) {
      sum.x += __shfl_xor_sync(kAllLanes, sum.x, distance);
      sum.y += __shfl_xor_sync(kAllLanes, sum.y, distance);
      sum.z += __shfl_xor_sync(kAllLanes, sum.z, distance);
      sum.w += __shfl_xor_sync(kAllLanes, sum.w, distance);
      product += __shfl_xor_sync(kAllLanes, product, distance);
    }
    if (lane_id() < kColumnLanes) {
      *reinterpret_cast<float4*>(sums + (warp * kHeads + reader) * kColumns + lane * 4) = sum;
      products[warp * kHeads + reader] = product;  // lanes of one row have equal ones
    }
  }
}

// kColumns columns of a state: decayed, written, read by every query head of the state.
template <class T>
__device__ void far_part(const MixerArgs<T>& a, int block, int row, float* shared) {
  __shared__ float gates[2];
  const int tiles = (a.dim + kColumns - 1) / kColumns;
  const int state = block / tiles;
  const int lane = static_cast<int>(threadIdx.x) % kColumnLanes;
  const int first_row = static_cast<int>(threadIdx.x) / kColumnLanes;
  const int column = block % tiles * kColumns + lane * 4;
  const bool there = column < a.dim;
  const std::int64_t own = static_cast<std::int64_t>(a.sequences[row]) * a.states + state;
  float* c = a.c + own * a.dim * a.dim + column;
  float4 before[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int feature = pass * kFeatureRows + first_row;
    before[pass] =
        there && feature < a.dim
            ? *reinterpret_cast<const float4*>(c + static_cast<std::int64_t>(feature) * a.dim)
            : float4{};
  }
  if (threadIdx.x == 0) {
    const std::int64_t at = static_cast<std::int64_t>(row) * a.states + state;
    const StepGates step(a.i_gate[at], a.f_gate[at], a.m[own]);
    gates[0] = step.forget;
    gates[1] = step.input;
  }
  float* k = shared;                                    // [dim] input * k
  float* n = k + kMostDim;                              // [dim] after this token
  float* q = n + kMostDim;                              // [kHeads, dim] of the readers at hand
  float* sums = q + kHeads * kMostDim;                  // [kWarps, kHeads, kColumns]
  float* products = sums + kWarps * kHeads * kColumns;  // [kWarps, kHeads]
  const int readers = a.heads / a.states;
  const std::int64_t first_head = static_cast<std::int64_t>(row) * a.heads + state * readers;
  const auto stage_readers = [&](int first) {
    const T* from = a.feature_q + (first_head + first) * a.dim;
    for (int i = static_cast<int>(threadIdx.x); i < min(kHeads, readers - first) * a.dim;
         i += kThreads) {
      q[i] = load_float(from[i]);
    }
  };
  stage_readers(0);
  __syncthreads();
  const float forget = gates[0];
  const float input = gates[1];
  const T* keys = a.feature_k + (static_cast<std::int64_t>(row) * a.states + state) * a.dim;
  for (int i = static_cast<int>(threadIdx.x); i < a.dim; i += kThreads) {
    k[i] = input * load_float(keys[i]);
    n[i] = forget * a.n[own * a.dim + i] + k[i];
  }
  __syncthreads();
  const int value_head = state / (a.states / a.kv_heads);
  const T* values =
      a.value + (static_cast<std::int64_t>(row) * a.kv_heads + value_head) * a.dim + column;
  float4 value{};
  if (there) {
    value = {
        load_float(values[0]), load_float(values[1]), load_float(values[2]), load_float(values[3])};
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int feature = pass * kFeatureRows + first_row;
    if (there && feature < a.dim) {
      float4& x = before[pass];
      x.x = forget * x.x + k[feature] * value.x;
      x.y = forget * x.y + k[feature] * value.y;
      x.z = forget * x.z + k[feature] * value.z;
      x.w = forget * x.w + k[feature] * value.w;
      *reinterpret_cast<float4*>(c + static_cast<std::int64_t>(feature) * a.dim) = x;
    }
  }
  for (int first = 0; first < readers; first += kHeads) {
    if (first > 0) {
      stage_readers(first);
      __syncthreads();
    }
    const int count = min(kHeads, readers - first);
    read_state(a, before, q, n, count, sums, products);
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < count * kColumns; i += kThreads) {
      const int to = block % tiles * kColumns + i % kColumns;
      float total = 0.0F;
      float normaliser = 0.0F;
      for (int w = 0; w < kWarps; ++w) {
        total += sums[w * kHeads * kColumns + i];
        normaliser += products[w * kHeads + i / kColumns];
      }
      if (to < a.dim) {
        a.far[(first_head + first + i / kColumns) * a.dim + to] = total / (normaliser + kTiny);
      }
    }
    __syncthreads();
  }
}

__host__ __device__ constexpr int part_floats(int groups) {
  const int near = 2 * groups * kHeads + groups * (kThreads / groups) * kElements;
  const int far = (2 + kHeads) * kMostDim + kWarps * kHeads * (kColumns + 1);
  return near > far ? near : far;
}

// Blocks (near parts, then far parts) of a row.
template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads) parts_kernel(const __grid_constant__ MixerArgs<T> a) {
  __shared__ __align__(16) float shared[part_floats(kThreads / kLanes)];
  let_kernel_after_start();
  wait_for_kernel_before();
  const int block = static_cast<int>(blockIdx.x);
  const int row = static_cast<int>(blockIdx.y);
  if (block < a.near_blocks) {
    near_part<T, kLanes>(a, block, row, shared);
  } else {
    far_part(a, block - a.near_blocks, row, shared);
  }
}

// Block (head, row).
template <class T>
__global__ void __launch_bounds__(kThreads) join_kernel(const __grid_constant__ MixerArgs<T> a) {
  __shared__ float weights[kSplits];
  __shared__ float total_weight;
  let_kernel_after_start();
  wait_for_kernel_before();
  const int head = static_cast<int>(blockIdx.x);
  const int row = static_cast<int>(blockIdx.y);
  const std::int64_t at = static_cast<std::int64_t>(row) * a.heads + head;
  const int splits = a.q == nullptr ? 0 : num_splits(a.lengths[row]);
  const int stride = a.dim + 2;
  const float* partial = a.partial_of(row, head, 0);
  if (a.q != nullptr) {
    // Every warp alike.
    const float sink = a.sink == nullptr ? -INFINITY : load_float(a.sink[head]);
    float largest = sink;
    const int lane = lane_id();
    for (int split = lane; split < splits; split += kWarp) {
      largest = fmaxf(largest, partial[split * stride + a.dim]);
    }
    largest = warp_max(largest);
    float total = 0.0F;
    for (int split = lane; split < splits; split += kWarp) {
      const float weight = expf(partial[split * stride + a.dim] - largest);
      if (threadIdx.x < kWarp) {
        weights[split] = weight;
      }
      total += weight * partial[split * stride + a.dim + 1];
    }
    total = warp_sum(total) + expf(sink - largest);
    if (threadIdx.x == 0) {
      total_weight = total;
    }
  }
  __syncthreads();
  const float gate = a.gate == nullptr ? 0.0F : a.gate[at];
  const float open = 1.0F / (1.0F + expf(-gate));
  const float shut = 1.0F / (1.0F + expf(gate));
  for (int i = static_cast<int>(threadIdx.x); i < a.dim; i += kThreads) {
    float near = 0.0F;
#pragma unroll 4
    for (int split = 0; split < splits; ++split) {
      near = fmaf(weights[split], partial[split * stride + i], near);
    }
    near = a.q == nullptr ? 0.0F : near / total_weight;
    const float far = a.feature_q == nullptr ? 0.0F : a.far[at * a.dim + i];
    a.y[at * a.dim + i] = store_as<T>(a.gate == nullptr ? near + far : open * far + shut * near);
  }
  if (a.feature_q == nullptr || head % (a.heads / a.states) != 0) {
    return;
  }
  const int state = head / (a.heads / a.states);
  const std::int64_t own = static_cast<std::int64_t>(a.sequences[row]) * a.states + state;
  const std::int64_t gates_at = static_cast<std::int64_t>(row) * a.states + state;
  const StepGates step(a.i_gate[gates_at], a.f_gate[gates_at], a.m[own]);
  for (int i = static_cast<int>(threadIdx.x); i < a.dim; i += kThreads) {
    float& n = a.n[own * a.dim + i];
    n = step.forget * n + step.input * load_float(a.feature_k[gates_at * a.dim + i]);
  }
  __syncthreads();  // all have read m
  if (threadIdx.x == 0) {
    a.m[own] = step.m;
  }
}

template <class T>
MixerArgs<T> mixer_args(const DecodeMixer& op, std::int64_t first, std::int64_t count) {
  const std::int64_t heads = op.y.shape[1];
  const std::int64_t dim = op.y.shape[2];
  const std::int64_t q_skipped = first * heads * dim;
  MixerArgs<T> a{};
  a.y = op.y.as<T>() + q_skipped;
  a.heads = static_cast<int>(heads);
  a.dim = static_cast<int>(dim);
  a.gate = op.gate ? op.gate.as<float>() + first * heads : nullptr;
  a.scale = 1.0F / std::sqrt(static_cast<float>(dim));
  a.partial = op.workspace.as<float>() + first * heads * (kDecodeSplits * (dim + 2) + dim);
  a.far = a.partial + count * heads * kDecodeSplits * (dim + 2);
  if (op.near.q) {
    a.q = op.near.q.as<T>() + q_skipped;
    a.lengths = op.near.lengths.as<std::int32_t>() + first;
    a.sink = op.near.sink ? op.near.sink.as<T>() : nullptr;
    a.kv_heads = static_cast<int>(op.near.k.front().shape[1] / dim);
    std::int64_t most = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const auto at = static_cast<std::size_t>(first + i);
      a.k[i] = op.near.k[at].as<T>();
      a.v[i] = op.near.v[at].as<T>();
      most = std::max(most, op.near.k[at].shape[0]);
      BIFOCAL_REQUIRE(
          is_aligned(16, a.k[i], a.v[i]), "[{}] wanted caches on multiples of 16 bytes", kWhere);
    }
    a.head_parts = static_cast<int>(ceil_div(a.heads / a.kv_heads, kHeads));
    const std::int64_t splits = std::min<std::int64_t>(kSplits, ceil_div(most, kLeastSlots));
    a.near_blocks = static_cast<int>(splits) * a.kv_heads * a.head_parts;
  }
  if (op.far.q) {
    const DecodeMixer::Far& far = op.far;
    a.kv_heads = static_cast<int>(far.v.shape[1]);
    a.states = static_cast<int>(far.k.shape[1]);
    a.feature_q = far.q.as<T>() + q_skipped;
    a.feature_k = far.k.as<T>() + first * a.states * dim;
    a.value = far.v.as<T>() + first * a.kv_heads * dim;
    a.i_gate = far.i_gate.as<float>() + first * a.states;
    a.f_gate = far.f_gate.as<float>() + first * a.states;
    a.sequences = far.sequences.as<std::int32_t>() + first;
    a.c = far.c.as<float>();
    a.n = far.n.as<float>();
    a.m = far.m.as<float>();
  }
  return a;
}

template <class T>
void launch_mixer(CudaStream& stream, const MixerArgs<T>& a, std::int64_t count) {
  const int tiles = static_cast<int>(ceil_div(a.dim, kColumns));
  const int blocks = a.near_blocks + (a.feature_q == nullptr ? 0 : a.states * tiles);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(count));
  const int lanes = a.dim / kElements;
  if (lanes <= 8) {
    launch_dependent(stream, grid, kThreads, 0, parts_kernel<T, 8>, a);
  } else if (lanes <= 16) {
    launch_dependent(stream, grid, kThreads, 0, parts_kernel<T, 16>, a);
  } else {
    launch_dependent(stream, grid, kThreads, 0, parts_kernel<T, kWarp>, a);
  }
  launch_dependent(stream,
                   dim3(static_cast<unsigned>(a.heads), static_cast<unsigned>(count)),
                   kThreads,
                   0,
                   join_kernel<T>,
                   a);
}

}  // namespace

void run(CudaStream& stream, const DecodeMixer& op) {
  const std::int64_t dim = op.y.shape[2];
  BIFOCAL_REQUIRE(dim % kElements == 0 && dim <= kMostDim,
                  "[{}] wanted heads whose width is a multiple of {} up to {}, got {}",
                  kWhere,
                  kElements,
                  kMostDim,
                  dim);
  BIFOCAL_REQUIRE(op.workspace, "[{}] wanted a workspace, got none", kWhere);
  dispatch_device(kWhere, op.y.dtype, [&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t first = 0; first < op.y.shape[0]; first += kMostRows) {
      const std::int64_t count = std::min<std::int64_t>(kMostRows, op.y.shape[0] - first);
      launch_mixer(stream, mixer_args<T>(op, first, count), count);
    }
  });
}

}  // namespace bifocal
