// The mLSTM's states between chunks, and their gradients, on Hopper. A block walks over the chunks
// of a segment of one state with [C, n] in the registers of one or two warpgroups, 64 features
// each. A first kernel sums up each segment alone, a scan joins the segments, a second kernel goes
// over them again from what reaches each and stores the states between chunks.
#include <algorithm>

#include "kernels/mlstm_hopper_backward.cuh"

namespace bifocal {
namespace hopper {
namespace {

constexpr int kStages = 2;  // pairs of tiles in flight

// Sums over chunks of outer products of scaled rows.
struct OuterSums {
  const MlstmRowScales* scales;  // [heads of the left factor, chunks]
  int repeats;                   // heads of the left factor for each state
  int left_of_right;             // and for each head of the right one
  bool reverse;                  // from right to left
};

struct SegmentArgs {
  MlstmShape shape;
  OuterSums sums;
  int segments, chunks_of_segment;
  float* x;     // [segments, states, state_size]: own sums, then what reaches
  float* pass;  // [states, segments]: what a state keeps across the segment
  MlstmRoundedStates to;
};

struct SegmentMaps {
  CUtensorMap left, right;
};

template <int D>
struct SegmentMemory {
  static constexpr int kTile = kMlstmChunk * D;

  BFloat16 left[kStages][kTile], right[kStages][kTile];
  BFloat16 state[D * D];
  MlstmRowScales scales[kStages];
  Barrier full[kStages];
};

template <int D, bool kStores>
class SegmentWalk {
 public:
  static constexpr int kThreads = D / kGroupRows * kGroupThreads;

  __device__ SegmentWalk(const SegmentArgs& args, const SegmentMaps& maps, SegmentMemory<D>& memory)
      : args_(args),
        maps_(maps),
        memory_(memory),
        state_(static_cast<int>(blockIdx.x) % args.shape.states),
        segment_(static_cast<int>(blockIdx.x) / args.shape.states),
        first_(segment_ * args.chunks_of_segment),
        chunks_(min(args.chunks_of_segment, args.shape.chunks - first_)) {}

  __device__ void run() {
    const int repeats = args_.sums.repeats;
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        memory_.full[stage].init(1);
      }
      publish_barriers();
      for (int step = 0; step < kStages; ++step) {
        load(step);
      }
    }
    __syncthreads();
    start();
    float pass = 1.0F;
    RingPlace<kStages> place;
#pragma unroll 1
    for (int step = 0; step < chunks_ * repeats; ++step) {
      const bool opens = step % repeats == 0;
      if (kStores && opens) {
        store_rounded(chunk_at(step / repeats));
      }
      memory_.full[place.stage].wait(place.parity);
      const MlstmRowScales& scales = memory_.scales[place.stage];
      if (opens) {
        pass *= scales.pass;
        pass_chunk(scales.pass);
      }
      add(memory_.left[place.stage], memory_.right[place.stage], scales);
      if (kStores && threadIdx.x == 0) {
        wait_stores_read<0>();
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        load(step + kStages);
      }
      place.advance();
    }
    if (!kStores) {
      store_sums(pass);
    }
  }

 private:
  // The chunk that is the walk's `i`-th.
  __device__ int chunk_at(int i) const {
    return args_.sums.reverse ? first_ + chunks_ - 1 - i : first_ + i;
  }

  // By one thread.
  __device__ void load(int step) {
    constexpr int kTileBytes = SegmentMemory<D>::kTile * static_cast<int>(sizeof(BFloat16));
    const int repeats = args_.sums.repeats;
    if (step >= chunks_ * repeats) {
      return;
    }
    const int stage = step % kStages;
    const int chunk = chunk_at(step / repeats);
    const int head = state_ * repeats + step % repeats;
    Barrier& full = memory_.full[stage];
    full.arrive_expect(2 * kTileBytes + static_cast<int>(sizeof(MlstmRowScales)));
    load_chunk<D>(memory_.left[stage], maps_.left, full, head, chunk);
    load_chunk<D>(memory_.right[stage], maps_.right, full, head / args_.sums.left_of_right, chunk);
    load_bytes(&memory_.scales[stage],
               args_.sums.scales + static_cast<std::int64_t>(head) * args_.shape.chunks + chunk,
               sizeof(MlstmRowScales),
               full);
  }

  // This thread's first feature, the other is eight further on.
  static __device__ int feature() {
    return static_cast<int>(threadIdx.x) / 32 * 16 + lane_of_warp() / 4;
  }

  __device__ float* own() const {
    return args_.x + args_.shape.state_at(segment_, state_);
  }

  __device__ void start() {
#pragma unroll
    for (int i = 0; i < D / 2; ++i) {
      c_[i] = 0.0F;
    }
    n_[0] = n_[1] = 0.0F;
    if (kStores) {
      const float* from = own();
#pragma unroll
      for (int i = 0; i < D / 4; ++i) {
        const int at = (feature() + i % 2 * 8) * D + i / 2 * 8 + pair_column();
        const auto pair = load_vector<2>(from + at, 0);
        c_[2 * i] = pair.element[0];
        c_[2 * i + 1] = pair.element[1];
      }
      if (lane_of_warp() % 4 == 0) {  // n is a sum over four lanes
        n_[0] = from[D * D + feature()];
        n_[1] = from[D * D + feature() + 8];
      }
    }
  }

  // What a start of a document ends may be anything, and is not multiplied.
  __device__ void pass_chunk(float pass) {
#pragma unroll
    for (int i = 0; i < D / 2; ++i) {
      c_[i] = pass == 0.0F ? 0.0F : pass * c_[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      n_[half] = pass == 0.0F ? 0.0F : pass * n_[half];
    }
  }

  // Rows of the left tile are scaled and rounded, and n is the sum of the same rounded rows, so
  // that C / n stays a mean of values whatever the rounding.
  __device__ void add(const BFloat16* left, const BFloat16* right, const MlstmRowScales& scales) {
    std::uint32_t factor[kMlstmChunk / 16][4];
    const int lane = lane_of_warp();
    const int first = feature() - lane / 4;
#pragma unroll
    for (int step = 0; step < kMlstmChunk / 16; ++step) {
      const int token = step * 16 + lane % 8 + lane / 16 * 8;
      load_matrices_transposed(factor[step],
                               SharedElements(left),
                               swizzled_offset(kMlstmChunk, token, first + lane / 8 % 2 * 8));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = step * 16 + i / 2 * 8 + pair_column();
        const auto scale = load_vector<2>(scales.scale + t, 0);
        const auto extra = load_vector<2>(scales.extra + t, 0);
        std::uint32_t& pair = factor[step][i];
        pair = pack_bfloat16(scale.element[0] * low_of(pair), scale.element[1] * high_of(pair));
        n_[i % 2] += extra.element[0] * low_of(pair) + extra.element[1] * high_of(pair);
      }
    }
    keep(factor);
    keep(c_);
    begin_products();
    add_rows<D>(c_, factor, right);
    commit_products();
    wait_products<0>();
    keep(c_);
    keep(factor);
  }

  // Before chunk `chunk` in the walk's direction. All reads of the tile by the copy engine are
  // done.
  __device__ void store_rounded(int chunk) {
#pragma unroll
    for (int i = 0; i < D / 4; ++i) {
      const int at = swizzled_offset(D, feature() + i % 2 * 8, i / 2 * 8) + pair_column();
      *reinterpret_cast<std::uint32_t*>(memory_.state + at) =
          pack_bfloat16(c_[2 * i], c_[2 * i + 1]);
    }
    publish_shared();
    const std::int64_t at = static_cast<std::int64_t>(chunk) * args_.shape.states + state_;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float n = quad_sum(n_[half]);
      if (lane_of_warp() % 4 == 0) {
        args_.to.n[at * D + feature() + half * 8] = n;
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      store_bytes(
          args_.to.c + at * D * D, memory_.state, D * D * static_cast<int>(sizeof(BFloat16)));
      commit_stores();
    }
  }

  __device__ void store_sums(float pass) const {
    float* to = own();
#pragma unroll
    for (int i = 0; i < D / 4; ++i) {
      const int at = (feature() + i % 2 * 8) * D + i / 2 * 8 + pair_column();
      store_vector<2>(to + at, 0, Vector<float, 2>{{c_[2 * i], c_[2 * i + 1]}});
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float n = quad_sum(n_[half]);
      if (lane_of_warp() % 4 == 0) {
        to[D * D + feature() + half * 8] = n;
      }
    }
    if (threadIdx.x == 0) {
      args_.pass[static_cast<std::int64_t>(state_) * args_.segments + segment_] = pass;
    }
  }

  const SegmentArgs& args_;
  const SegmentMaps& maps_;
  SegmentMemory<D>& memory_;
  const int state_, segment_, first_, chunks_;
  float c_[D / 2];
  float n_[2];  // in parts of four lanes
};

template <int D, bool kStores>
__global__ void __launch_bounds__(SegmentWalk<D, kStores>::kThreads, 2)
    segment_kernel(const __grid_constant__ SegmentArgs args,
                   const __grid_constant__ SegmentMaps maps) {
#if BIFOCAL_HOPPER_CODE
  SegmentWalk<D, kStores>(args, maps, *reinterpret_cast<SegmentMemory<D>*>(swizzle_memory())).run();
#endif
}

template <int D, bool kStores>
void launch(CudaStream& stream, const SegmentArgs& args, const SegmentMaps& maps) {
  constexpr int kBytes = static_cast<int>(sizeof(SegmentMemory<D>)) + kSwizzleAtomBytes;
  launch_kernel(stream,
                grid_of(static_cast<std::int64_t>(args.segments) * args.shape.states),
                SegmentWalk<D, kStores>::kThreads,
                kBytes,
                segment_kernel<D, kStores>,
                args,
                maps);
}

// A block for each chunk of each state.
__global__ void __launch_bounds__(kMlstmChunk)
    write_scales_kernel(MlstmShape shape, MlstmScalars scalars, MlstmRowScales* to) {
  const int state = static_cast<int>(blockIdx.x) % shape.states;
  const int chunk = static_cast<int>(blockIdx.x) / shape.states;
  const int t = static_cast<int>(threadIdx.x);
  const int begin = chunk * kMlstmChunk;
  const int last = shape.length(chunk) - 1;
  const std::int64_t at = static_cast<std::int64_t>(state) * shape.tokens + begin;
  const std::int64_t place = static_cast<std::int64_t>(state) * shape.chunks + chunk;
  const bool written = t <= last && begin + t >= scalars.first[begin + last];
  to[place].scale[t] =
      written ? mlstm_weight(scalars.row[at + last], scalars.column[at + t]) : 0.0F;
  to[place].extra[t] = 1.0F;
  if (t == 0) {
    to[place].pass = scalars.pass[place];
  }
}

// What reaches each chunk in the sums' direction, to `to`, and the ends of the row.
void walk(CudaStream& stream,
          DeviceScratch& scratch,
          const MlstmArrays<BFloat16>& a,
          const OuterSums& sums,
          const SegmentMaps& maps,
          const MlstmRoundedStates& to,
          const MlstmScanTargets& targets) {
  const MlstmShape& shape = a.shape;
  const int blocks = 2 * num_multiprocessors();
  SegmentArgs args{.shape = shape,
                   .sums = sums,
                   .segments = std::clamp(blocks / shape.states, 1, shape.chunks),
                   .chunks_of_segment = 0,
                   .x = nullptr,
                   .pass = nullptr,
                   .to = to};
  args.chunks_of_segment = static_cast<int>(ceil_div(shape.chunks, args.segments));
  args.segments = static_cast<int>(ceil_div(shape.chunks, args.chunks_of_segment));
  args.x = scratch.take<float>(shape.state_at(args.segments, 0));
  args.pass = scratch.take<float>(static_cast<std::int64_t>(shape.states) * args.segments);
  shape.dim == 64 ? launch<64, false>(stream, args, maps) : launch<128, false>(stream, args, maps);
  MlstmShape segments = shape;
  segments.chunks = args.segments;
  MlstmScalars scalars = a.scalars;
  scalars.pass = args.pass;
  if (sums.reverse) {
    scan_mlstm_gradients(stream, segments, scalars, args.x, targets);
  } else {
    scan_mlstm_states(stream, segments, scalars, args.x, targets);
  }
  shape.dim == 64 ? launch<64, true>(stream, args, maps) : launch<128, true>(stream, args, maps);
}

}  // namespace

void mlstm_write_scales(CudaStream& stream, const HopperMlstm& m) {
  const MlstmShape& shape = m.a.shape;
  launch_kernel(stream,
                grid_of(static_cast<std::int64_t>(shape.chunks) * shape.states),
                kMlstmChunk,
                0,
                write_scales_kernel,
                shape,
                m.a.scalars,
                m.write_scales);
}

void mlstm_states(CudaStream& stream,
                  DeviceScratch& scratch,
                  const HopperMlstm& m,
                  const MlstmScanTargets& targets) {
  const OuterSums sums{m.write_scales, 1, m.a.shape.holders, false};
  walk(stream, scratch, m.a, sums, {m.k, m.v}, m.entering, targets);
}

void mlstm_state_gradients(CudaStream& stream,
                           DeviceScratch& scratch,
                           const HopperMlstm& m,
                           const MlstmScanTargets& targets) {
  const OuterSums sums{m.read_scales, m.a.shape.readers, 1, true};
  walk(stream, scratch, m.a, sums, {m.q, m.d_h}, m.leaving, targets);
}

}  // namespace hopper
}  // namespace bifocal
