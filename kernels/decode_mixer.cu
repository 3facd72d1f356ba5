// The mixer of one token in two kernels. The first cuts the work so that few rows fill the device:
// a row's slots into splits, a state into columns. The second joins the splits in their order, adds
// the sink, moves n and m on, and mixes. How a row is cut depends on its own length alone, and so
// do the bits of its result.
#include <algorithm>
#include <cmath>

#include "kernels/decode_mixer_far.cuh"
#include "kernels/decode_mixer_near.cuh"
#include "kernels/dependent.cuh"
#include "kernels/launch.cuh"

namespace bifocal {
namespace decode_mixer {
namespace {

constexpr const char* kWhere = "decode_mixer";

union PartsShared {
  NearShared near;
  FarShared far;
};

// Blocks (near parts, then far parts) of a row.
template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads) parts_kernel(const __grid_constant__ MixerArgs<T> a) {
  __shared__ PartsShared shared;
  const int block = static_cast<int>(blockIdx.x);
  const int row = static_cast<int>(blockIdx.y);
  if (block < a.near_blocks) {
    near_part<T, kLanes>(a, block, row, shared.near);
  } else {
    far_part(a, block - a.near_blocks, row, shared.far);
  }
  // At the end: a start of join at once costs 3 % of a layer (72.5 to 74.7 us at Qwen3.5-4B's
  // shape).
  let_kernel_after_start();
}

// A thread's two columns of a head's splits, 16 splits at a time.
struct SplitColumns {
  static constexpr int kTogether = 16;

  float2 sum[kTogether];

  template <class T>
  __device__ void load(const MixerArgs<T>& a, const float* partial, int first, int splits) {
    const int column = static_cast<int>(threadIdx.x) * 2;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      sum[i] = column < a.dim && first + i < splits
                   ? *reinterpret_cast<const float2*>(partial + (first + i) * (a.dim + 2) + column)
                   : float2{};
    }
  }
};

// Weights of the splits, in shared memory by the first warp; every warp has the sum of weights, in
// which the sink counts.
template <class T>
__device__ float weigh_splits(
    const MixerArgs<T>& a, const float* partial, int splits, int head, float* weights) {
  constexpr int kOfLane = kSplits / kWarp;
  float2 scale[kOfLane];  // largest logit, sum of exponentials
  const float sink = a.sink == nullptr ? -INFINITY : load_float(a.sink[head]);
  float largest = sink;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int split = i * kWarp + lane_id();
    scale[i] = split < splits
                   ? *reinterpret_cast<const float2*>(partial + split * (a.dim + 2) + a.dim)
                   : float2{-INFINITY, 0.0F};
    largest = fmaxf(largest, scale[i].x);
  }
  largest = warp_max(largest);
  float total = 0.0F;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const float weight = expf(scale[i].x - largest);
    if (warp_id() == 0) {
      weights[i * kWarp + lane_id()] = weight;
    }
    total += weight * scale[i].y;
  }
  return warp_sum(total) + expf(sink - largest);
}

// n and m of a state after this token, by the block of its first query head.
template <class T>
struct StateVectors {
  bool is_mine;
  std::int64_t own = 0;
  std::int64_t at = 0;
  float m = 0.0F;
  float i_gate = 0.0F;
  float f_gate = 0.0F;
  float n[kOwn] = {};
  float k[kOwn] = {};

  // What the token before left.
  __device__ StateVectors(const MixerArgs<T>& a, int head, int row)
      : is_mine(a.feature_q != nullptr && head % (a.heads / a.states) == 0) {
    if (!is_mine) {
      return;
    }
    const int state = head / (a.heads / a.states);
    own = static_cast<std::int64_t>(a.sequences[row]) * a.states + state;
    at = static_cast<std::int64_t>(row) * a.states + state;
    m = a.m[own];
#pragma unroll
    for (int o = 0; o < kOwn; ++o) {
      const int i = o * kThreads + static_cast<int>(threadIdx.x);
      n[o] = i < a.dim ? a.n[own * a.dim + i] : 0.0F;
    }
  }

  // What this token brings.
  __device__ void read_token(const MixerArgs<T>& a) {
    if (!is_mine) {
      return;
    }
    i_gate = a.i_gate[at];
    f_gate = a.f_gate[at];
#pragma unroll
    for (int o = 0; o < kOwn; ++o) {
      const int i = o * kThreads + static_cast<int>(threadIdx.x);
      k[o] = i < a.dim ? load_float(a.feature_k[at * a.dim + i]) : 0.0F;
    }
  }

  __device__ void advance(const MixerArgs<T>& a) const {
    if (!is_mine) {
      return;
    }
    const StepGates step(i_gate, f_gate, m);
#pragma unroll
    for (int o = 0; o < kOwn; ++o) {
      const int i = o * kThreads + static_cast<int>(threadIdx.x);
      if (i < a.dim) {
        a.n[own * a.dim + i] = step.forget * n[o] + step.input * k[o];
      }
    }
    __syncthreads();  // all have read m
    if (threadIdx.x == 0) {
      a.m[own] = step.m;
    }
  }
};

// Block (head, row).
template <class T>
__global__ void __launch_bounds__(kThreads) join_kernel(const __grid_constant__ MixerArgs<T> a) {
  __shared__ float weights[kSplits];
  const int head = static_cast<int>(blockIdx.x);
  const int row = static_cast<int>(blockIdx.y);
  const std::int64_t at = static_cast<std::int64_t>(row) * a.heads + head;
  const int splits = a.q == nullptr ? 0 : num_splits(a.lengths[row]);
  StateVectors<T> vectors(a, head, row);
  const int column = static_cast<int>(threadIdx.x) * 2;
  const bool has_column = column < a.dim;
  wait_for_kernel_before();
  let_kernel_after_start();  // not before: rings of weights would fill ahead of what the parts read
  const float* partial = a.partial_of(row, head, 0);
  SplitColumns columns;
  columns.load(a, partial, 0, splits);
  vectors.read_token(a);
  const float2 far = a.feature_q != nullptr && has_column
                         ? *reinterpret_cast<const float2*>(a.far + at * a.dim + column)
                         : float2{};
  const float gate = a.gate == nullptr ? 0.0F : a.gate[at];
  float2 near{};
  if (a.q != nullptr) {
    const float total = weigh_splits(a, partial, splits, head, weights);
    __syncthreads();
    for (int first = 0; first < splits; first += SplitColumns::kTogether) {
      if (first > 0) {
        columns.load(a, partial, first, splits);
      }
#pragma unroll
      for (int i = 0; i < SplitColumns::kTogether; ++i) {
        near.x = fmaf(weights[first + i], columns.sum[i].x, near.x);
        near.y = fmaf(weights[first + i], columns.sum[i].y, near.y);
      }
    }
    near = {near.x / total, near.y / total};
  }
  if (has_column) {
    const float open = a.gate == nullptr ? 1.0F : 1.0F / (1.0F + expf(-gate));
    const float shut = a.gate == nullptr ? 1.0F : 1.0F / (1.0F + expf(gate));
    Vector<T, 2> y;
    y.element[0] = store_as<T>(open * far.x + shut * near.x);
    y.element[1] = store_as<T>(open * far.y + shut * near.y);
    store_vector<2>(a.y + at * a.dim + column, 0, y);
  }
  vectors.advance(a);
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
    a.newest = op.near.newest ? op.near.newest.as<std::int32_t>() + first : nullptr;
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
    const std::int64_t splits = std::min<std::int64_t>(kSplits, ceil_div(most, kBatch));
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

void run_mixer(CudaStream& stream, const DecodeMixer& op) {
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

}  // namespace
}  // namespace decode_mixer

void run(CudaStream& stream, const DecodeMixer& op) {
  decode_mixer::run_mixer(stream, op);
}

}  // namespace bifocal
