// A segment of the mLSTM forward on Hopper: what its blocks hold, what the copy engine brings, and
// the state that goes from chunk to chunk in registers.
#pragma once

#include "kernels/mlstm_hopper.cuh"
#include "kernels/warp.cuh"

namespace bifocal::hopper {

inline constexpr int kConsumers = 2;
inline constexpr int kThreads = (kConsumers + 1) * kGroupThreads;
inline constexpr int kConsumerThreads = kConsumers * kGroupThreads;
inline constexpr int kStages = 2;  // chunks of keys and values in flight
inline constexpr int kBothConsumers =
    1 + kConsumers;  // a named barrier; 1 and 2 are of a warpgroup each

// What of a state of this head width a block has: all features, a slice of the values. At width 256
// the registers hold a quarter of them, and shared memory C once.
template <int Width>
struct SegmentForm {
  static constexpr int kWidth = Width;
  static constexpr int kValues = Width == 128 ? 128 : 64;
  static constexpr int kSlices = Width / kValues;
  static constexpr int kCopies = Width == 128 ? 2 : 1;  // of C; chunks take turns in two
  static constexpr int kSlots = Width == 128 ? 5 : 3;   // tiles of queries in flight
  static constexpr int kParts = Width / (kConsumers * kGroupRows);  // of 64 features in a warpgroup
  static constexpr int kTile = kMlstmChunk * kWidth;                // of keys or queries
  static constexpr int kValueTile = kMlstmChunk * kValues;
  static constexpr int kStateTile = kWidth * kValues;
};

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
  BFloat16* h;

  __device__ float* state_of(int segment, int state) const {
    return states + shape.state_at(segment, state);
  }
};

template <class Form>
struct SegmentMemory {
  BFloat16 c[Form::kCopies][Form::kStateTile];  // C before a chunk, rounded
  BFloat16 k[kStages][Form::kTile], v[kStages][Form::kValueTile];
  BFloat16 q[Form::kSlots][Form::kTile];  // queries; at width 128 then what they read
  PackedChunk packed[kStages];
  // n as a sum of two bfloat16
  BFloat16 n_high[Form::kCopies][Form::kWidth], n_low[Form::kCopies][Form::kWidth];
  Barrier full[kStages], empty[kStages];
  Barrier q_full[Form::kSlots], q_empty[Form::kSlots];
};

// The block's chunks of one state, and its slice of the values.
struct Segment {
  int slice, state, index, first, end;

  __device__ Segment(const SegmentArgs& args, int slices)
      : slice(static_cast<int>(blockIdx.x) % slices),
        state(static_cast<int>(blockIdx.x) / slices % args.shape.states),
        index(static_cast<int>(blockIdx.x) / slices / args.shape.states),
        first(index * args.chunks_of_segment),
        end(min(first + args.chunks_of_segment, args.shape.chunks)) {}
};

template <class Form, bool kReads>
__device__ void load_segment(const SegmentMaps& maps,
                             const SegmentArgs& args,
                             SegmentMemory<Form>& memory) {
  constexpr int kTileBytes = sizeof(memory.k[0]);
  const Segment segment(args, Form::kSlices);
  const int v_head = segment.state / args.shape.holders;
  RingPlace<kStages> place;
  RingPlace<Form::kSlots> slot;
  const auto load = [](BFloat16* to, const CUtensorMap& map, Barrier& full, int head, int token) {
#pragma unroll
    for (int column = 0; column < Form::kWidth; column += kSwizzleColumns) {
      load_box(to + kMlstmChunk * column, map, full, column, head, token);
    }
  };
  for (int chunk = segment.first; chunk < segment.end; ++chunk) {
    const int stage = place.stage;
    const int token = chunk * kMlstmChunk;
    Barrier& full = memory.full[stage];
    memory.empty[stage].wait(place.parity ^ 1);
    full.arrive_expect(
        static_cast<int>(sizeof(memory.k[0]) + sizeof(memory.v[0]) + sizeof(PackedChunk)));
    load(memory.k[stage], maps.k, full, segment.state, token);
    load_bytes(&memory.packed[stage],
               args.packed + static_cast<std::int64_t>(segment.state) * args.shape.chunks + chunk,
               sizeof(PackedChunk),
               full);
#pragma unroll
    for (int column = 0; column < Form::kValues; column += kSwizzleColumns) {
      load_box(memory.v[stage] + kMlstmChunk * column,
               maps.v,
               full,
               segment.slice * Form::kValues + column,
               v_head,
               token);
    }
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

// The features of [C, n] in the registers of a warpgroup, 64 after another. A thread's rows of each
// 64 are feature() and eight more, pairs of neighbouring columns of either in turn; four lanes hold
// the same two numbers of n.
template <class Form>
struct KeptState {
  static constexpr int kNumbers = Form::kValues / 2;

  float c[Form::kParts][kNumbers];
  float n[Form::kParts][2];

  static __device__ int feature(int part) {
    const int group = static_cast<int>(threadIdx.x) / kGroupThreads - 1;
    return (group * Form::kParts + part) * kGroupRows + warp_id() % 4 * 16 + lane_id() / 4;
  }

  __device__ void clear() {
#pragma unroll
    for (int part = 0; part < Form::kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) {
        c[part][i] = 0.0F;
      }
      n[part][0] = n[part][1] = 0.0F;
    }
  }

  // Column `first` of C is the first of this block's.
  __device__ void load(const float* from, int first) {
#pragma unroll
    for (int part = 0; part < Form::kParts; ++part) {
      const float* row = from + feature(part) * Form::kWidth + first + lane_id() % 4 * 2;
#pragma unroll
      for (int i = 0; i < kNumbers / 2; ++i) {
        const auto pair = load_vector<2>(row + i % 2 * 8 * Form::kWidth + i / 2 * 8, 0);
        c[part][2 * i] = pair.element[0];
        c[part][2 * i + 1] = pair.element[1];
      }
      const float* sums = from + Form::kWidth * Form::kWidth + feature(part);
      n[part][0] = sums[0];
      n[part][1] = sums[8];
    }
  }

  // n goes with the first slice.
  __device__ void store(float* to, int first) const {
#pragma unroll
    for (int part = 0; part < Form::kParts; ++part) {
      float* row = to + feature(part) * Form::kWidth + first + lane_id() % 4 * 2;
#pragma unroll
      for (int i = 0; i < kNumbers / 2; ++i) {
        const Vector<float, 2> pair{{c[part][2 * i], c[part][2 * i + 1]}};
        store_vector<2>(row + i % 2 * 8 * Form::kWidth + i / 2 * 8, 0, pair);
      }
      if (first == 0 && lane_id() % 4 == 0) {
        float* sums = to + Form::kWidth * Form::kWidth + feature(part);
        sums[0] = n[part][0];
        sums[8] = n[part][1];
      }
    }
  }

  // Rounded, for reads.
  __device__ void publish(SegmentMemory<Form>& memory, int copy) const {
    const int pair_in_chunk = lane_id() % 4 * 2;
#pragma unroll
    for (int part = 0; part < Form::kParts; ++part) {
      const int first = fresh(feature(part));
#pragma unroll
      for (int i = 0; i < kNumbers / 2; ++i) {
        const int row = first + i % 2 * 8;
        BFloat16* at =
            memory.c[copy] + swizzled_offset(Form::kWidth, row, i / 2 * 8) + pair_in_chunk;
        *reinterpret_cast<std::uint32_t*>(at) = pack_bfloat16(c[part][2 * i], c[part][2 * i + 1]);
      }
      if (lane_id() % 4 == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto high = store_as<BFloat16>(n[part][half]);
          memory.n_high[copy][first + half * 8] = high;
          memory.n_low[copy][first + half * 8] =
              store_as<BFloat16>(n[part][half] - load_float(high));
        }
      }
    }
    publish_shared();
  }

  // Takes a chunk in. Rows of keys are scaled and rounded, and n is the sum of the same rounded
  // rows, so that C / n stays a mean of values whatever the rounding.
  __device__ void take(const BFloat16* k, const BFloat16* v, const PackedChunk& packed) {
    std::uint32_t factor[Form::kParts][kMlstmChunk / 16][4];
#pragma unroll
    for (int part = 0; part < Form::kParts; ++part) {
      float sum[2] = {};
      scale_keys(factor[part], sum, k, packed, part);
      pass_chunk(c[part], n[part], packed.pass, sum);
    }
    begin_products();
    const Operand values = Operand::by_columns(v, kMlstmChunk);
#pragma unroll
    for (int step = 0; step < kMlstmChunk / 16; ++step) {
#pragma unroll
      for (int part = 0; part < Form::kParts; ++part) {
        multiply<true>(c[part], factor[part][step], values + column_step(step), true);
      }
    }
    commit_products();
    wait_products<0>();
#pragma unroll
    for (int part = 0; part < Form::kParts; ++part) {
      keep(c[part]);
      keep(factor[part]);
    }
  }

 private:
  static __device__ void scale_keys(std::uint32_t (&factor)[kMlstmChunk / 16][4],
                                    float (&sum)[2],
                                    const BFloat16* k,
                                    const PackedChunk& packed,
                                    int part) {
    const int lane = fresh(lane_id());
    const int first = feature(part) - lane / 4;
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
  }

  // What a start of a document ends may be anything, and is not multiplied.
  static __device__ void pass_chunk(float (&c)[kNumbers],
                                    float (&n)[2],
                                    float pass,
                                    const float (&sum)[2]) {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      c[i] = pass == 0.0F ? 0.0F : pass * c[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float own = sum[half];
      own += __shfl_xor_sync(kAllLanes, own, 1);
      own += __shfl_xor_sync(kAllLanes, own, 2);
      n[half] = pass == 0.0F ? own : pass * n[half] + own;
    }
    keep(c);
  }
};

// The sum of a segment alone.
template <class Form>
__device__ void sum_segment(const SegmentArgs& args, SegmentMemory<Form>& memory) {
  const Segment segment(args, Form::kSlices);
  KeptState<Form> state;
  state.clear();
  float pass = 1.0F;
  RingPlace<kStages> place;
  for (int chunk = segment.first; chunk < segment.end; ++chunk) {
    const int stage = place.stage;
    memory.full[stage].wait(place.parity);
    state.take(memory.k[stage], memory.v[stage], memory.packed[stage]);
    pass *= memory.packed[stage].pass;
    arrive_warp(memory.empty[stage]);
    place.advance();
  }
  state.store(args.state_of(segment.index, segment.state), segment.slice * Form::kValues);
  if (segment.slice == 0 && threadIdx.x == kGroupThreads) {
    args.pass[segment.state * args.segments + segment.index] = pass;
  }
}

}  // namespace bifocal::hopper
