// The mLSTM forward on Hopper, for bfloat16 and head widths 128 and 256. Chunks are gathered in
// segments, a block for each of one state and slice of its values: [C, n] stays in float32 in the
// registers of two warpgroups, half of the features each, and goes from chunk to chunk; a third
// warpgroup has the copy engine bring what they need. A first kernel sums up each segment alone, a
// scan joins the segments, a second kernel goes over them again with the state that enters, and
// reads. What lies in between never leaves the multiprocessor.
#include <algorithm>

#include "kernels/kernel_choice.h"
#include "kernels/mlstm_hopper_forward.cuh"

namespace bifocal {
namespace hopper {

// Reads of a segment; the warpgroups take turns in the query heads of the state.
template <class Form>
class Reader {
 public:
  __device__ Reader(const SegmentMaps& maps, const SegmentArgs& args, SegmentMemory<Form>& memory)
      : maps_(maps),
        args_(args),
        memory_(memory),
        segment_(args, Form::kSlices),
        consumer_(static_cast<int>(threadIdx.x) / kGroupThreads - 1),
        row_(warp_id() % 4 * 16 + lane_id() / 4) {}

  __device__ void run() {
    KeptState<Form> state;
    state.load(args_.state_of(segment_.index, segment_.state), segment_.slice * Form::kValues);
    RingPlace<kStages> place;
    memory_.full[0].wait(place.parity);
    if (memory_.packed[0].values.carry[0] == 0.0F) {
      state.clear();  // an empty state may be anything
    }
    state.publish(memory_, 0);
    named_sync(kBothConsumers, kConsumerThreads);
    for (int chunk = segment_.first; chunk < segment_.end; ++chunk) {
      const int stage = place.stage;
      memory_.full[stage].wait(place.parity);
      if constexpr (kInTurns) {
        const int turn = (chunk - segment_.first) % 2;
        take(state, stage, 1 - turn);
        read_all(chunk, stage, turn);
      } else {
        read_all(chunk, stage, 0);
        named_sync(kBothConsumers, kConsumerThreads);  // nobody reads C any more
        take(state, stage, 0);
      }
      named_sync(kBothConsumers, kConsumerThreads);  // C of the next chunk is whole, this one free
      arrive_warp(memory_.empty[stage]);
      place.advance();
    }
    wait_stores_read<0>();
  }

 private:
  static constexpr int kWidth = Form::kWidth;
  static constexpr int kSums = Form::kValues / 2;
  static constexpr bool kInTurns = Form::kCopies == 2;
  // What was read goes where the queries were, and from there through the copy engine.
  static constexpr bool kStoresTiles = Form::kValues == kWidth;

  __device__ void take(KeptState<Form>& state, int stage, int copy) {
    state.take(memory_.k[stage], memory_.v[stage], memory_.packed[stage]);
    state.publish(memory_, copy);
  }

  __device__ void read_all(int chunk, int stage, int copy) {
    const int readers = args_.shape.readers;
    for (int reader = consumer_; reader < readers; reader += kConsumers) {
      const int tile = (chunk - segment_.first) * readers + reader;
      const int slot = tile % Form::kSlots;
      memory_.q_full[slot].wait(tile / Form::kSlots % 2);
      read(chunk, stage, copy, reader, slot);
    }
  }

  __device__ void read(int chunk, int stage, int copy, int reader, int slot) {
    const MlstmChunkValues& values = memory_.packed[stage].values;
    BFloat16* q = memory_.q[slot];
    float s[kMlstmChunk / 2];
    float sums[kSums];
    std::uint32_t p[kMlstmChunk / 16][4];
    begin_products();
    multiply_keys(s, q, memory_.k[stage]);
    multiply_state(sums, q, memory_.c[copy]);
    if constexpr (kStoresTiles) {
      free_last();
    }
    float normaliser[2] = {};
    read_normaliser(normaliser, q, values, copy);
    wait_products<1>();
    keep(s);
    weigh(p, normaliser, s, values);
    wait_products<0>();
    keep(sums);
    if constexpr (!kStoresTiles) {
      arrive_warp(memory_.q_empty[slot]);
    }
    const float carry[2] = {values.carry[row_], values.carry[row_ + 8]};
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      sums[i] *= carry[i / 2 % 2];
    }
    keep(sums);
    begin_products();
    const Operand v = Operand::by_columns(memory_.v[stage], kMlstmChunk);
#pragma unroll
    for (int step = 0; step < kMlstmChunk / 16; ++step) {
      multiply<true>(sums, p[step], v + column_step(step), true);
    }
    commit_products();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      normaliser[half] = 1.0F / (quad_sum(normaliser[half]) + kMlstmFloatTiny);
    }
    wait_products<0>();
    keep(sums);
    keep(p);
    const int head = segment_.state * args_.shape.readers + reader;
    if constexpr (kStoresTiles) {
      store_tile(sums, normaliser, q, head, chunk);
      last_slot_ = slot;
    } else {
      store_rows(sums, normaliser, head, chunk);
    }
  }

  // s = q k^T
  static __device__ void multiply_keys(float (&s)[kMlstmChunk / 2],
                                       const BFloat16* q,
                                       const BFloat16* k) {
    const Operand left = Operand::by_rows(q);
    const Operand right = Operand::by_rows(k);
#pragma unroll
    for (int step = 0; step < kWidth / 16; ++step) {
      const int at = row_step(kMlstmChunk, step);
      multiply<false, false>(s, left + at, right + at, step > 0);
    }
    commit_products();
  }

  // sums = q C
  static __device__ void multiply_state(float (&sums)[kSums],
                                        const BFloat16* q,
                                        const BFloat16* c) {
    const Operand left = Operand::by_rows(q);
    const Operand right = Operand::by_columns(c, kWidth);
#pragma unroll
    for (int step = 0; step < kWidth / 16; ++step) {
      multiply<false, true>(
          sums, left + row_step(kMlstmChunk, step), right + column_step(step), step > 0);
    }
    commit_products();
  }

  // The slot of the tile before is free once its reads are on their way.
  __device__ void free_last() {
    if (threadIdx.x % kGroupThreads == 0 && last_slot_ >= 0) {
      wait_stores_read<0>();
      memory_.q_empty[last_slot_].arrive();
    }
  }

  // u q . n of a thread's two rows, in one of the four lanes that share them.
  __device__ void read_normaliser(float (&normaliser)[2],
                                  const BFloat16* q,
                                  const MlstmChunkValues& values,
                                  int copy) const {
    float sum[4] = {};
    const int lane = fresh(lane_id());
    const BFloat16* n = lane / 4 == 0 ? memory_.n_high[copy] : memory_.n_low[copy];
#pragma unroll
    for (int k = 0; k < kWidth; k += 16) {
      std::uint32_t left[4];
      const int row = row_ - lane / 4 + lane % 16;
      load_matrices(left, SharedElements(q), swizzled_offset(kMlstmChunk, row, k + lane / 16 * 8));
      const auto* pairs = reinterpret_cast<const std::uint32_t*>(n + k) + lane % 4;
      // Column 0 is the high part of n, column 1 the low one; six are zeros.
      multiply_add(sum, left, lane < 8 ? pairs[0] : 0U, lane < 8 ? pairs[4] : 0U);
    }
    if (lane % 4 == 0) {
      normaliser[0] = values.carry[row_] * (sum[0] + sum[1]);
      normaliser[1] = values.carry[row_ + 8] * (sum[2] + sum[3]);
    }
  }

  // Products become weights times them, rounded; what is summed is what is multiplied.
  __device__ void weigh(std::uint32_t (&p)[kMlstmChunk / 16][4],
                        float (&normaliser)[2],
                        const float (&s)[kMlstmChunk / 2],
                        const MlstmChunkValues& values) const {
    const int row = fresh(row_);
    const int last = row - lane_id() / 4 + 15;  // of the warp's tokens
#pragma unroll
    for (int i = 0; i < kMlstmChunk / 4; ++i) {  // a pair of neighbours
      const int t = row + i % 2 * 8;
      const int j = i / 2 * 8 + lane_id() % 4 * 2;
      std::uint32_t pair = 0;
      if (i / 2 * 8 <= last) {
        const float low = values.sees(t, j) ? exp2_fast(values.exponent(t, j)) : 0.0F;
        const float high = values.sees(t, j + 1) ? exp2_fast(values.exponent(t, j + 1)) : 0.0F;
        pair = pack_bfloat16(low * s[2 * i], high * s[2 * i + 1]);
      }
      p[i / 4][i % 4] = pair;
      normaliser[i % 2] += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xffff0000U);
    }
  }

  // Where the queries were, which no product needs any more, and on to memory.
  __device__ void store_tile(const float (&sums)[kSums],
                             const float (&factor)[2],
                             BFloat16* tile,
                             int head,
                             int chunk) const {
    const int first = fresh(row_);
    const int pair_in_chunk = lane_id() % 4 * 2;
    named_sync(1 + consumer_, kGroupThreads);
#pragma unroll
    for (int i = 0; i < kSums / 2; ++i) {
      const int at = swizzled_offset(kMlstmChunk, first + i % 2 * 8, i / 2 * 8) + pair_in_chunk;
      *reinterpret_cast<std::uint32_t*>(tile + at) =
          pack_bfloat16(sums[2 * i] * factor[i % 2], sums[2 * i + 1] * factor[i % 2]);
    }
    publish_shared();
    named_sync(1 + consumer_, kGroupThreads);
    if (threadIdx.x % kGroupThreads == 0) {
#pragma unroll
      for (int column = 0; column < kWidth; column += kSwizzleColumns) {
        store_box(maps_.h, tile + kMlstmChunk * column, column, head, chunk * kMlstmChunk);
      }
      commit_stores();
    }
  }

  // Straight to memory: four lanes exchange pairs until each has eight columns of its own.
  __device__ void store_rows(const float (&sums)[kSums],
                             const float (&factor)[2],
                             int head,
                             int chunk) const {
    constexpr int kColumns = kVectorSize<BFloat16>;
    const int lane = lane_id() % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = chunk * kMlstmChunk + row_ + half * 8;
      BFloat16* to = args_.h + args_.shape.head_row(token, head) + segment_.slice * Form::kValues;
#pragma unroll
      for (int column = 0; column < Form::kValues; column += 4 * kColumns) {
        std::uint32_t word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // of columns column + 8 j
          const int i = (column / kColumns + j) * 4 + half * 2;
          word[j] = pack_bfloat16(sums[i] * factor[half], sums[i + 1] * factor[half]);
        }
        exchange<1>(word, lane);
        exchange<2>(word, lane);
        if (token < args_.shape.tokens) {
          store_packed(to + column, lane, Packed<BFloat16>{{word[0], word[1], word[2], word[3]}});
        }
      }
    }
  }

  // Words whose number lacks the bit `Bit` of the lane's, for the other lane's that have it.
  template <int Bit>
  static __device__ void exchange(std::uint32_t (&word)[4], int lane) {
    const bool is_upper = (lane & Bit) != 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if ((j & Bit) == 0) {
        const std::uint32_t sent = is_upper ? word[j] : word[j | Bit];
        const std::uint32_t got = __shfl_xor_sync(kAllLanes, sent, Bit);
        word[j] = is_upper ? got : word[j];
        word[j | Bit] = is_upper ? word[j | Bit] : got;
      }
    }
  }

  const SegmentMaps& maps_;
  const SegmentArgs& args_;
  SegmentMemory<Form>& memory_;
  const Segment segment_;
  const int consumer_;
  const int row_;  // this thread's first token of a chunk; the other is eight further on
  int last_slot_ = -1;
};

namespace {

template <class Form, bool kReads>
__global__ void __launch_bounds__(kThreads, 1)
    segment_kernel(const __grid_constant__ SegmentMaps maps, const SegmentArgs args) {
#if BIFOCAL_HOPPER_CODE
  // Who frees a tile of queries: the thread that waits for its stores, or each warp.
  constexpr int kFreed = Form::kSlices == 1 ? 1 : kGroupThreads / kWarp * kWarpArrivals;
  auto& memory = *reinterpret_cast<SegmentMemory<Form>*>(swizzle_memory());
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      memory.full[i].init(1);
      memory.empty[i].init(kConsumerThreads / kWarp * kWarpArrivals);
    }
    for (int i = 0; i < Form::kSlots; ++i) {
      memory.q_full[i].init(1);
      memory.q_empty[i].init(kFreed);
    }
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    lower_registers<24>();
    if (threadIdx.x == 0) {
      load_segment<Form, kReads>(maps, args, memory);
    }
  } else {
    raise_registers<240>();
    if constexpr (kReads) {
      Reader<Form>(maps, args, memory).run();
    } else {
      sum_segment(args, memory);
    }
  }
#endif
}

// A block of 64 threads for each chunk of each state.
__global__ void __launch_bounds__(kMlstmChunk)
    pack_kernel(MlstmShape shape, MlstmScalars scalars, PackedChunk* packed) {
  const int chunk = static_cast<int>(blockIdx.x);
  const int state = static_cast<int>(blockIdx.y);
  const std::int64_t at = static_cast<std::int64_t>(state) * shape.chunks + chunk;
  packed[at].values.load(shape, scalars, chunk, state);
  if (threadIdx.x == 0) {
    packed[at].pass = scalars.pass[at];
  }
}

template <class Form, bool kReads>
void launch(CudaStream& stream, const SegmentMaps& maps, const SegmentArgs& args) {
  constexpr int kBytes = static_cast<int>(sizeof(SegmentMemory<Form>)) + kSwizzleAtomBytes;
  launch_kernel(
      stream,
      grid_of(static_cast<std::int64_t>(args.segments) * args.shape.states * Form::kSlices),
      kThreads,
      kBytes,
      segment_kernel<Form, kReads>,
      maps,
      args);
}

template <class Form>
void forward(CudaStream& stream, const MlstmArrays<BFloat16>& a, const MlstmScanTargets& targets) {
  constexpr int kBlocks = 132;  // one a multiprocessor of an H100 or H200
  const MlstmShape& shape = a.shape;
  DeviceScratch scratch(stream);
  auto* packed = scratch.take<PackedChunk>(static_cast<std::int64_t>(shape.states) * shape.chunks);
  const dim3 grid(static_cast<unsigned>(shape.chunks), static_cast<unsigned>(shape.states));
  launch_kernel(stream, grid, kMlstmChunk, 0, pack_kernel, shape, a.scalars, packed);
  SegmentArgs args{
      .shape = shape,
      .segments = std::clamp(kBlocks / (shape.states * Form::kSlices), 1, shape.chunks),
      .chunks_of_segment = 0,
      .packed = packed,
      .states = nullptr,
      .pass = nullptr,
      .h = a.h_out};
  args.chunks_of_segment = static_cast<int>(ceil_div(shape.chunks, args.segments));
  args.segments = static_cast<int>(ceil_div(shape.chunks, args.chunks_of_segment));
  args.states = scratch.take<float>(shape.state_at(args.segments, 0));
  args.pass = scratch.take<float>(static_cast<std::int64_t>(shape.states) * args.segments);
  const SegmentMaps maps{.q = mlstm_map(shape, a.q, shape.heads),
                         .k = mlstm_map(shape, a.k, shape.states),
                         .v = mlstm_map(shape, a.v, shape.v_heads),
                         .h = mlstm_map(shape, a.h_out, shape.heads)};
  launch<Form, false>(stream, maps, args);
  MlstmShape segments = shape;
  segments.chunks = args.segments;
  MlstmScalars scalars = a.scalars;
  scalars.pass = args.pass;
  scan_mlstm_states(stream, segments, scalars, args.states, targets);
  launch<Form, true>(stream, maps, args);
}

}  // namespace
}  // namespace hopper

bool has_hopper_mlstm(const MlstmArrays<BFloat16>& a) {
  return use_hopper_kernels() && (a.shape.dim == 128 || a.shape.dim == 256) && a.shape.tokens > 0 &&
         is_aligned(16, a.q, a.k, a.v, a.h_out);
}

void hopper_mlstm_forward(CudaStream& stream,
                          const MlstmArrays<BFloat16>& a,
                          const MlstmScanTargets& targets) {
  a.shape.dim == 128 ? hopper::forward<hopper::SegmentForm<128>>(stream, a, targets)
                     : hopper::forward<hopper::SegmentForm<256>>(stream, a, targets);
}

}  // namespace bifocal
