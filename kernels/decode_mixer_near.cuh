// Attention of a few query heads over one split of their key-value head's slots, 16 slots at a
// time: logits with lanes over a key, weights with a warp for each head, sums with two columns of
// the values for each thread.
#pragma once

#include "kernels/decode_mixer.cuh"
#include "kernels/dependent.cuh"

namespace bifocal::decode_mixer {

// The block's split and heads.
struct NearBlock {
  int split, kv_head, first_head, heads;
  int begin, end;  // slots; none in splits that the row does not need

  template <class T>
  __device__ NearBlock(const MixerArgs<T>& a, int block, int row) {
    split = block / (a.kv_heads * a.head_parts);
    const int part = block % (a.kv_heads * a.head_parts);
    kv_head = part / a.head_parts;
    const int readers = a.heads / a.kv_heads;
    first_head = kv_head * readers + part % a.head_parts * kHeads;
    heads = min(kHeads, (kv_head + 1) * readers - first_head);
    const int slots = a.lengths[row];
    const int length = split_slots(slots);
    begin = split * length;
    end = min(slots, begin + length);
  }
};

// Two columns of a value; two numbers of 16 bits in one register.
template <class T>
struct ColumnPair {
  float2 pair;

  __device__ float2 get() const { return pair; }
};

template <>
struct ColumnPair<BFloat16> {
  std::uint32_t pair;

  __device__ float2 get() const {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000U)};
  }
};

// A thread's part of 16 slots' keys, for logits, and of their values, for sums.
template <class T, int kLanes>
struct SlotBatch {
  static constexpr int kGroups = kThreads / kLanes;  // of lanes that share a slot
  static constexpr int kTurns = kBatch / kGroups;
  static constexpr int kPieces = kElements / kVectorSize<T>;

  Packed<T> key[kTurns][kPieces];
  ColumnPair<T> value[kBatch];
  const T *keys, *values;
  std::int64_t stride;
  int end;
  bool has_key, has_value;  // lanes and threads past a head's width do as the first

  __device__ SlotBatch(const MixerArgs<T>& a, const NearBlock& b, int row)
      : stride(static_cast<std::int64_t>(a.kv_heads) * a.dim), end(b.end) {
    const int column = static_cast<int>(threadIdx.x) % kLanes * kElements;
    const int pair = static_cast<int>(threadIdx.x) * 2;
    has_key = column < a.dim;
    has_value = pair < a.dim;
    keys = a.k[row] + b.kv_head * a.dim + (has_key ? column : 0);
    values = a.v[row] + b.kv_head * a.dim + (has_value ? pair : 0);
  }

  __device__ static int slot_of(int first, int turn) {
    return first + turn * kGroups + static_cast<int>(threadIdx.x) / kLanes;
  }

  // The slots from `first` on; past the end, the last.
  __device__ void load_keys(int first) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const T* from = keys + min(slot_of(first, turn), end - 1) * stride;
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        key[turn][p] = load_packed(from, p);
      }
    }
  }

  __device__ void load_values(int first) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      value[i] = *reinterpret_cast<const ColumnPair<T>*>(values + min(first + i, end - 1) * stride);
    }
  }

  // The compiler keeps no addresses of loads across it, which take registers.
  __device__ void forget_addresses() {
    asm volatile("" : "+l"(keys), "+l"(values), "+l"(stride));
  }
};

struct NearShared {
  float logits[kHeads][kBatch];
  float4 weights[kBatch];  // of the heads
  float keep[kHeads];      // factors of what was summed before
};

// Logits of 16 slots to shared memory; -inf past the end.
template <class T, int kLanes>
__device__ void store_logits(const MixerArgs<T>& a,
                             const SlotBatch<T, kLanes>& batch,
                             const Packed<T> (&q)[kHeads][SlotBatch<T, kLanes>::kPieces],
                             int first,
                             NearShared& shared) {
  using Slots = SlotBatch<T, kLanes>;
  constexpr int kLogits = Slots::kTurns * kHeads;
  static_assert(kLogits * 2 == kLanes);
  float logits[kLogits];
#pragma unroll
  for (int turn = 0; turn < Slots::kTurns; ++turn) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float sum = 0.0F;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        constexpr int kWide = kVectorSize<T>;
        sum = fmaf(q[h][i / kWide][i % kWide], batch.key[turn][i / kWide][i % kWide], sum);
      }
      logits[turn * kHeads + h] = sum;
    }
  }
  const float logit = sums_over_lanes<kLanes>(logits) * a.scale;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  if (lane % 2 == 0) {
    const int slot = Slots::slot_of(first, lane / 2 / kHeads);
    shared.logits[lane / 2 % kHeads][slot - first] = slot < batch.end ? logit : -INFINITY;
  }
}

// A warp's head: the largest logit so far, and the sum of exponentials at its scale.
struct HeadWeights {
  float largest = -INFINITY;
  float total = 0.0F;

  __device__ void take(NearShared& shared) {
    const int head = warp_id();
    const int slot = lane_id() % kBatch;
    const float logit = shared.logits[head][slot];
    const float next = fmaxf(largest, warp_max<kBatch>(logit));
    const float keep = expf(largest - next);
    const float weight = expf(logit - next);
    largest = next;
    total = total * keep + warp_sum<kBatch>(weight);
    if (lane_id() < kBatch) {
      reinterpret_cast<float*>(&shared.weights[slot])[head] = weight;
    }
    if (lane_id() == 0) {
      shared.keep[head] = keep;
    }
  }
};

template <class T>
__device__ void add_values(const ColumnPair<T> (&value)[kBatch],
                           const NearShared& shared,
                           float (&sums)[kHeads][2]) {
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    sums[h][0] *= shared.keep[h];
    sums[h][1] *= shared.keep[h];
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const float4 weights = shared.weights[i];
    const float of_head[kHeads] = {weights.x, weights.y, weights.z, weights.w};
    const float2 pair = value[i].get();
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      sums[h][0] = fmaf(of_head[h], pair.x, sums[h][0]);
      sums[h][1] = fmaf(of_head[h], pair.y, sums[h][1]);
    }
  }
}

// The first slots are read before the kernel before has ended, and again if one of them is new.
template <class T, int kLanes>
__device__ void near_part(const MixerArgs<T>& a, int block, int row, NearShared& shared) {
  using Slots = SlotBatch<T, kLanes>;
  static_assert(kHeads == kWarps && kThreads * 2 >= kMostDim);
  const NearBlock b(a, block, row);
  if (b.begin >= b.end) {
    wait_for_kernel_before();
    return;
  }
  Slots batch(a, b, row);
  const int newest = a.newest == nullptr ? b.begin : a.newest[row];
  if (a.newest != nullptr) {
    batch.load_keys(b.begin);
    batch.load_values(b.begin);
  }
  wait_for_kernel_before();
  Packed<T> q[kHeads][Slots::kPieces];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const std::int64_t at = (static_cast<std::int64_t>(row) * a.heads + b.first_head + h) * a.dim +
                            static_cast<int>(threadIdx.x) % kLanes * kElements;
#pragma unroll
    for (int p = 0; p < Slots::kPieces; ++p) {
      q[h][p] = batch.has_key && h < b.heads ? load_packed(a.q + at, p) : Packed<T>{};
    }
  }
  batch.forget_addresses();
  if (newest >= b.begin && newest < b.begin + kBatch) {
    batch.load_keys(b.begin);
    batch.load_values(b.begin);
  }
  HeadWeights head;
  float sums[kHeads][2] = {};
  for (int first = b.begin; first < b.end; first += kBatch) {
    if (first > b.begin) {
      batch.load_values(first);
    }
    store_logits<T, kLanes>(a, batch, q, first, shared);
    __syncthreads();
    batch.load_keys(first + kBatch);
    head.take(shared);
    __syncthreads();
    add_values(batch.value, shared, sums);
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h < b.heads && batch.has_value) {
      *reinterpret_cast<float2*>(a.partial_of(row, b.first_head + h, b.split) + threadIdx.x * 2) =
          float2{sums[h][0], sums[h][1]};
    }
  }
  if (lane_id() == 0 && warp_id() < b.heads) {
    float* to = a.partial_of(row, b.first_head + warp_id(), b.split) + a.dim;
    to[0] = head.largest;
    to[1] = head.total;
  }
}

}  // namespace bifocal::decode_mixer
