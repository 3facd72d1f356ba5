// A segment of the mLSTM forward on Hopper: what its blocks hold, what the copy engine brings, and
// the state that goes from chunk to chunk in registers.
#pragma once

#include "kernels/mlstm_hopper.cuh"
#include "kernels/warp.cuh"

namespace bifocal::hopper {

inline constexpr int kWidth = 128;
inline constexpr int kConsumers = 2;
inline constexpr int kThreads = (kConsumers + 1) * kGroupThreads;
inline constexpr int kConsumerThreads = kConsumers * kGroupThreads;
inline constexpr int kStages = 2;                   // chunks of keys and values in flight
inline constexpr int kSlots = 5;                    // tiles of queries in flight
inline constexpr int kTile = kMlstmChunk * kWidth;  // of keys, values, queries or reads
inline constexpr int kStateTile = kWidth * kWidth;  // of C
inline constexpr int kTileBytes = kTile * static_cast<int>(sizeof(BFloat16));
inline constexpr int kBothConsumers =
    1 + kConsumers;  // a named barrier; 1 and 2 are of a warpgroup each

// x, from which the compiler derives nothing ahead of a loop: addresses would take the registers of
// sums.
__device__ inline int fresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Scalars of a chunk of a state as the copy engine brings them.
struct PackedChunk {
  MlstmChunkValues values;
  float pass;
  float unused[kMlstmChunk - 1];
};

static_assert(sizeof(PackedChunk) % 16 == 0);  // what the copy engine moves

struct SegmentMaps {
  CUtensorMap q, k, v, h;
};

struct SegmentArgs {
  MlstmShape shape;
  int segments, chunks_of_segment;
  const PackedChunk* packed;  // [states, chunks]
  float* states;              // [segments, states, state_size]: own sums, then what enters
  float* pass;                // [states, segments]: what a state keeps across the segment

  __device__ float* state_of(int segment, int state) const {
    return states + shape.state_at(segment, state);
  }
};

struct SegmentMemory {
  BFloat16 c[2][kStateTile];  // C before a chunk, rounded; chunks take turns
  BFloat16 k[kStages][kTile], v[kStages][kTile];
  BFloat16 q[kSlots][kTile];  // queries, then what they read
  PackedChunk packed[kStages];
  BFloat16 n_high[2][kWidth], n_low[2][kWidth];  // n as a sum of two bfloat16
  Barrier full[kStages], empty[kStages];
  Barrier q_full[kSlots], q_empty[kSlots];
};

// The block's chunks of one state.
struct Segment {
  int state, index, first, end;

  __device__ explicit Segment(const SegmentArgs& args)
      : state(static_cast<int>(blockIdx.x) % args.shape.states),
        index(static_cast<int>(blockIdx.x) / args.shape.states),
        first(index * args.chunks_of_segment),
        end(min(first + args.chunks_of_segment, args.shape.chunks)) {}
};

template <bool kReads>
__device__ inline void load_segment(const SegmentMaps& maps,
                                    const SegmentArgs& args,
                                    SegmentMemory& memory) {
  const Segment segment(args);
  const int v_head = segment.state / args.shape.holders;
  RingPlace<kStages> place;
  RingPlace<kSlots> slot;
  const auto load = [](BFloat16* to, const CUtensorMap& map, Barrier& full, int head, int token) {
#pragma unroll
    for (int column = 0; column < kWidth; column += kSwizzleColumns) {
      load_box(to + kMlstmChunk * column, map, full, column, head, token);
    }
  };
  for (int chunk = segment.first; chunk < segment.end; ++chunk) {
    const int stage = place.stage;
    const int token = chunk * kMlstmChunk;
    Barrier& full = memory.full[stage];
    memory.empty[stage].wait(place.parity ^ 1);
    full.arrive_expect(2 * kTileBytes + static_cast<int>(sizeof(PackedChunk)));
    load(memory.k[stage], maps.k, full, segment.state, token);
    load_bytes(&memory.packed[stage],
               args.packed + static_cast<std::int64_t>(segment.state) * args.shape.chunks + chunk,
               sizeof(PackedChunk),
               full);
    load(memory.v[stage], maps.v, full, v_head, token);
    place.advance();
    for (int reader = 0; kReads && reader < args.shape.readers; ++reader) {
      Barrier& q_full = memory.q_full[slot.stage];
      memory.q_empty[slot.stage].wait(slot.parity ^ 1);
      q_full.arrive_expect(kTileBytes);
      load(
          memory.q[slot.stage], maps.q, q_full, segment.state * args.shape.readers + reader, token);
      slot.advance();
    }
  }
}

// 64 features of [C, n] in the registers of a warpgroup. A thread's rows are feature() and eight
// more, pairs of neighbouring columns of either in turn; four lanes hold the same two numbers of n.
struct KeptState {
  float c[kWidth / 2];
  float n[2];

  static __device__ int feature() {
    return (static_cast<int>(threadIdx.x) / kGroupThreads - 1) * kGroupRows + warp_id() % 4 * 16 +
           lane_id() / 4;
  }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      c[i] = 0.0F;
    }
    n[0] = n[1] = 0.0F;
  }

  __device__ void load(const float* from) {
    const float* first = from + feature() * kWidth + lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kWidth / 4; ++i) {
      const auto pair = load_vector<2>(first + i % 2 * 8 * kWidth + i / 2 * 8, 0);
      c[2 * i] = pair.element[0];
      c[2 * i + 1] = pair.element[1];
    }
    n[0] = from[kStateTile + feature()];
    n[1] = from[kStateTile + feature() + 8];
  }

  __device__ void store(float* to) const {
    float* first = to + feature() * kWidth + lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kWidth / 4; ++i) {
      const Vector<float, 2> pair{{c[2 * i], c[2 * i + 1]}};
      store_vector<2>(first + i % 2 * 8 * kWidth + i / 2 * 8, 0, pair);
    }
    if (lane_id() % 4 == 0) {
      to[kStateTile + feature()] = n[0];
      to[kStateTile + feature() + 8] = n[1];
    }
  }

  // Rounded, for reads.
  __device__ void publish(SegmentMemory& memory, int turn) const {
    const int first = fresh(feature());
    const int pair_in_chunk = lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kWidth / 4; ++i) {
      const int row = first + i % 2 * 8;
      BFloat16* at = memory.c[turn] + swizzled_offset(kWidth, row, i / 2 * 8) + pair_in_chunk;
      *reinterpret_cast<std::uint32_t*>(at) = pack_bfloat16(c[2 * i], c[2 * i + 1]);
    }
    if (lane_id() % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto high = store_as<BFloat16>(n[half]);
        memory.n_high[turn][feature() + half * 8] = high;
        memory.n_low[turn][feature() + half * 8] = store_as<BFloat16>(n[half] - load_float(high));
      }
    }
    publish_shared();
  }

  // Takes a chunk in. Rows of keys are scaled and rounded, and n is the sum of the same rounded
  // rows, so that C / n stays a mean of values whatever the rounding.
  __device__ void take(const BFloat16* k, const BFloat16* v, const PackedChunk& packed) {
    std::uint32_t factor[kMlstmChunk / 16][4];
    float sum[2] = {};
    const int lane = fresh(lane_id());
    const int first = feature() - lane / 4;
#pragma unroll
    for (int step = 0; step < kMlstmChunk / 16; ++step) {
      const int token = step * 16 + lane % 8 + lane / 16 * 8;
      load_matrices_transposed(factor[step],
                               SharedElements(k),
                               swizzled_offset(kMlstmChunk, token, first + lane / 8 % 2 * 8));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = step * 16 + i / 2 * 8 + lane % 4 * 2;
        std::uint32_t& pair = factor[step][i];
        pair = pack_bfloat16(packed.values.write[t] * __uint_as_float(pair << 16),
                             packed.values.write[t + 1] * __uint_as_float(pair & 0xffff0000U));
        sum[i % 2] += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xffff0000U);
      }
    }
    pass_chunk(packed.pass, sum);
    begin_products();
    const Operand values = Operand::by_columns(v, kMlstmChunk);
#pragma unroll
    for (int step = 0; step < kMlstmChunk / 16; ++step) {
      multiply<true>(c, factor[step], values + column_step(step), true);
    }
    commit_products();
    wait_products<0>();
    keep(c);
    keep(factor);
  }

 private:
  // What a start of a document ends may be anything, and is not multiplied.
  __device__ void pass_chunk(float pass, const float (&sum)[2]) {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      c[i] = pass == 0.0F ? 0.0F : pass * c[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float own = sum[half];
      own += __shfl_xor_sync(0xffffffffU, own, 1);
      own += __shfl_xor_sync(0xffffffffU, own, 2);
      n[half] = pass == 0.0F ? own : pass * n[half] + own;
    }
    keep(c);
  }
};

// The sum of a segment alone.
__device__ inline void sum_segment(const SegmentArgs& args, SegmentMemory& memory) {
  const Segment segment(args);
  KeptState state;
  state.clear();
  float pass = 1.0F;
  RingPlace<kStages> place;
  for (int chunk = segment.first; chunk < segment.end; ++chunk) {
    const int stage = place.stage;
    memory.full[stage].wait(place.parity);
    state.take(memory.k[stage], memory.v[stage], memory.packed[stage]);
    pass *= memory.packed[stage].pass;
    __syncwarp();
    if (lane_id() == 0) {
      memory.empty[stage].arrive();
    }
    place.advance();
  }
  state.store(args.state_of(segment.index, segment.state));
  if (threadIdx.x == kGroupThreads) {
    args.pass[segment.state * args.segments + segment.index] = pass;
  }
}

}  // namespace bifocal::hopper
