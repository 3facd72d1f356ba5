// A step of a state's columns: decayed, written, read by every query head of the state.
#pragma once

#include "kernels/decode_mixer.cuh"
#include "kernels/dependent.cuh"

namespace bifocal::decode_mixer {

inline constexpr int kColumns = 16;  // of a state in a block
inline constexpr int kColumnLanes = kColumns / 4;
inline constexpr int kFeatureRows = kThreads / kColumnLanes;  // that a block reads at once
inline constexpr int kPasses = kMostDim / kFeatureRows;
inline constexpr int kOwn = kMostDim / kThreads;  // of a vector's numbers in a thread
inline constexpr float kTiny = 1e-30F;            // added to the normaliser, as everywhere

struct FarShared {
  float k[kMostDim];  // input * k
  float n[kMostDim];  // after this token
  float q[kHeads][kMostDim];
  float4 sums[kWarps][kHeads][kColumnLanes];
  float products[kWarps][kHeads];  // q n
};

// Where a block and a thread stand in a state.
struct FarBlock {
  int state, first_column, column, first_feature;
  std::int64_t own;         // the state among all sequences'
  std::int64_t at;          // the state among the rows'
  std::int64_t first_head;  // the first reader among the rows' heads
  bool has_column;

  template <class T>
  __device__ FarBlock(const MixerArgs<T>& a, int block, int row) {
    const int tiles = (a.dim + kColumns - 1) / kColumns;
    state = block / tiles;
    first_column = block % tiles * kColumns;
    column = first_column + static_cast<int>(threadIdx.x) % kColumnLanes * 4;
    first_feature = static_cast<int>(threadIdx.x) / kColumnLanes;
    own = static_cast<std::int64_t>(a.sequences[row]) * a.states + state;
    at = static_cast<std::int64_t>(row) * a.states + state;
    first_head = static_cast<std::int64_t>(row) * a.heads + state * (a.heads / a.states);
    has_column = column < a.dim;
  }

  __device__ int feature(int pass) const { return pass * kFeatureRows + first_feature; }

  template <class T>
  __device__ float4* place(const MixerArgs<T>& a, int pass) const {
    return reinterpret_cast<float4*>(a.c + own * a.dim * a.dim +
                                     static_cast<std::int64_t>(feature(pass)) * a.dim + column);
  }
};

// Features of up to kHeads readers.
template <class T>
__device__ void stage_readers(
    const MixerArgs<T>& a, const FarBlock& b, int first, int count, FarShared& shared) {
  float staged[kHeads][kOwn];
#pragma unroll
  for (int reader = 0; reader < kHeads; ++reader) {
    const T* from = a.feature_q + (b.first_head + first + reader) * a.dim;
#pragma unroll
    for (int o = 0; o < kOwn; ++o) {
      const int i = o * kThreads + static_cast<int>(threadIdx.x);
      staged[reader][o] = reader < count && i < a.dim ? load_float(from[i]) : 0.0F;
    }
  }
#pragma unroll
  for (int reader = 0; reader < kHeads; ++reader) {
#pragma unroll
    for (int o = 0; o < kOwn; ++o) {
      shared.q[reader][o * kThreads + static_cast<int>(threadIdx.x)] = staged[reader][o];
    }
  }
}

// Sums over the feature rows of each warp: of the state's columns for each reader, and of q n.
__device__ inline void read_state(
    const float4 (&state)[kPasses], const FarBlock& b, int dim, int readers, FarShared& shared) {
#pragma unroll
  for (int reader = 0; reader < kHeads; ++reader) {
    if (reader >= readers) {
      break;
    }
    float4 sum{};
    float product = 0.0F;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (b.feature(pass) < dim) {
        const float weight = shared.q[reader][b.feature(pass)];
        sum.x = fmaf(weight, state[pass].x, sum.x);
        sum.y = fmaf(weight, state[pass].y, sum.y);
        sum.z = fmaf(weight, state[pass].z, sum.z);
        sum.w = fmaf(weight, state[pass].w, sum.w);
        product = fmaf(weight, shared.n[b.feature(pass)], product);
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
      shared.sums[warp_id()][reader][lane_id()] = sum;
      shared.products[warp_id()][reader] = product;  // lanes of one row have equal ones
    }
  }
}

// What the readers get: a thread for each and column.
template <class T>
__device__ void store_far(
    const MixerArgs<T>& a, const FarBlock& b, int first, int count, const FarShared& shared) {
  const int reader = static_cast<int>(threadIdx.x) / kColumns;
  const int column = static_cast<int>(threadIdx.x) % kColumns;
  if (reader >= count || b.first_column + column >= a.dim) {
    return;
  }
  float total = 0.0F;
  float normaliser = 0.0F;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    total += reinterpret_cast<const float*>(shared.sums[warp][reader])[column];
    normaliser += shared.products[warp][reader];
  }
  a.far[(b.first_head + first + reader) * a.dim + b.first_column + column] =
      total / (normaliser + kTiny);
}

// The state is read before the kernel before has ended: the token before wrote it.
template <class T>
__device__ void far_part(const MixerArgs<T>& a, int block, int row, FarShared& shared) {
  static_assert(kHeads * kColumns <= kThreads);
  const FarBlock b(a, block, row);
  float4 state[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    state[pass] = b.has_column && b.feature(pass) < a.dim ? *b.place(a, pass) : float4{};
  }
  const float m = a.m[b.own];
  float n[kOwn];
#pragma unroll
  for (int o = 0; o < kOwn; ++o) {
    const int i = o * kThreads + static_cast<int>(threadIdx.x);
    n[o] = i < a.dim ? a.n[b.own * a.dim + i] : 0.0F;
  }
  wait_for_kernel_before();
  const int readers = a.heads / a.states;
  const int value_head = b.state / (a.states / a.kv_heads);
  const T* values =
      a.value + (static_cast<std::int64_t>(row) * a.kv_heads + value_head) * a.dim + b.column;
  float value[4];
  float k[kOwn];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    value[i] = b.has_column ? load_float(values[i]) : 0.0F;
  }
#pragma unroll
  for (int o = 0; o < kOwn; ++o) {
    const int i = o * kThreads + static_cast<int>(threadIdx.x);
    k[o] = i < a.dim ? load_float(a.feature_k[b.at * a.dim + i]) : 0.0F;
  }
  const StepGates step(a.i_gate[b.at], a.f_gate[b.at], m);
  stage_readers(a, b, 0, min(kHeads, readers), shared);
#pragma unroll
  for (int o = 0; o < kOwn; ++o) {
    const int i = o * kThreads + static_cast<int>(threadIdx.x);
    shared.k[i] = step.input * k[o];
    shared.n[i] = step.forget * n[o] + shared.k[i];
  }
  __syncthreads();
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    if (b.has_column && b.feature(pass) < a.dim) {
      const float weight = shared.k[b.feature(pass)];
      float4& x = state[pass];
      x.x = step.forget * x.x + weight * value[0];
      x.y = step.forget * x.y + weight * value[1];
      x.z = step.forget * x.z + weight * value[2];
      x.w = step.forget * x.w + weight * value[3];
      *b.place(a, pass) = x;
    }
  }
  for (int first = 0; first < readers; first += kHeads) {
    const int count = min(kHeads, readers - first);
    if (first > 0) {
      stage_readers(a, b, first, count, shared);
      __syncthreads();
    }
    read_state(state, b, a.dim, count, shared);
    __syncthreads();
    store_far(a, b, first, count, shared);
    __syncthreads();
  }
}

}  // namespace bifocal::decode_mixer
