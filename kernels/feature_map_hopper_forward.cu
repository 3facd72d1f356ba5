// Softmax features on Hopper, forward. Warpgroups of a block take turns at the tiles of one ring: y
// replaces x in its place of the ring and leaves from there.
#include <numeric>

#include "kernels/feature_map_hopper.cuh"

namespace bifocal {
namespace hopper {
namespace {

// More places than warpgroups: what is beyond is in flight.
template <int D>
struct ForwardShape {
  static constexpr int kGroups = D == 256 ? 2 : 3;
  static constexpr int kStages = D == 256 ? 3 : D == 128 ? 12 : 9;
  static constexpr int kBlocks = D == 64 ? 2 : 1;  // of a multiprocessor
  static constexpr int kThreads = kGroups * kGroupThreads;

  // A barrier tells its phases apart by their parity alone: one warpgroup waits for all of them,
  // one after the other, so a place has a barrier for each warpgroup that comes to it.
  static constexpr int kBarriers = std::lcm(kStages, kGroups);
};

template <int D>
struct ForwardMemory {
  BFloat16 weight[D * D];
  BFloat16 tile[ForwardShape<D>::kStages][kFeatureTokens * D];
  Barrier weight_full;
  Barrier full[ForwardShape<D>::kBarriers];
};

struct ForwardMaps {
  CUtensorMap x, weight, y;
};

struct ForwardArgs {
  int heads, repeats, tiles, slots;
};

template <int D>
class FeatureForward {
 public:
  using Shape = ForwardShape<D>;

  __device__ FeatureForward(const ForwardArgs& args,
                            const ForwardMaps& maps,
                            ForwardMemory<D>& memory)
      : maps_(maps),
        memory_(memory),
        head_(static_cast<int>(blockIdx.x) % args.heads),
        x_head_(head_ / args.repeats),
        slot_(static_cast<int>(blockIdx.x) / args.heads),
        slots_(args.slots),
        tiles_((args.tiles - slot_ + slots_ - 1) / slots_) {}

  __device__ void run() {
    if (threadIdx.x == 0) {
      start();
    }
    __syncthreads();
    const int group = warpgroup_id();
    const bool leads = threadIdx.x % kGroupThreads == 0;
    memory_.weight_full.wait(0);
#pragma unroll 1
    for (int i = group; i < tiles_; i += Shape::kGroups) {
      BFloat16* tile = memory_.tile[i % Shape::kStages];
      float z[D / 2];
      memory_.full[i % Shape::kBarriers].wait(i / Shape::kBarriers % 2);
      multiply_weight(z, tile);
      if (leads && i >= Shape::kGroups) {
        wait_stores_read<0>();
        load(i - Shape::kGroups + Shape::kStages);
      }
      __syncwarp();
      wait_products<0>();
      keep(z);
      apply_softmax(z);
      named_sync(1 + group, kGroupThreads);  // all warps have read x
      write(tile, z);
      publish_shared();
      named_sync(1 + group, kGroupThreads);
      if (leads) {
        store(i);
      }
    }
    if (leads) {
      wait_stores_read<0>();
    }
  }

 private:
  __device__ void start() {
    constexpr int kBytes = D * D * static_cast<int>(sizeof(BFloat16));
    memory_.weight_full.init(1);
    for (Barrier& full : memory_.full) {
      full.init(1);
    }
    publish_barriers();
    memory_.weight_full.arrive_expect(kBytes);
    load_weight<D, D>(memory_.weight, maps_.weight, memory_.weight_full, 0, head_);
    for (int i = 0; i < Shape::kStages; ++i) {
      load(i);
    }
  }

  // The first token of the block's tile `i`.
  __device__ int token(int i) const {
    return (slot_ + i * slots_) * kFeatureTokens;
  }

  // By one thread, once the place is free; nothing past the last tile.
  __device__ void load(int i) {
    constexpr int kBytes = kFeatureTokens * D * static_cast<int>(sizeof(BFloat16));
    if (i >= tiles_) {
      return;
    }
    Barrier& full = memory_.full[i % Shape::kBarriers];
    full.arrive_expect(kBytes);
    load_tokens<D>(memory_.tile[i % Shape::kStages], maps_.x, full, 0, x_head_, token(i));
  }

  __device__ void store(int i) const {
#pragma unroll
    for (int column = 0; column < D; column += kSwizzleColumns) {
      store_box(maps_.y,
                memory_.tile[i % Shape::kStages] + column * kFeatureTokens,
                column,
                head_,
                token(i));
    }
    commit_stores();
  }

  __device__ void multiply_weight(float (&z)[D / 2], const BFloat16* tile) const {
    const Operand x = Operand::by_rows(tile);
    const Operand weight = Operand::by_rows(memory_.weight);
    begin_products();
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      multiply<false, false>(
          z, x + row_step(kFeatureTokens, step), weight + row_step(D, step), step > 0);
    }
    commit_products();
  }

  static __device__ void apply_softmax(float (&z)[D / 2]) {
    constexpr float kLog2OfE = 1.44269504F;
#pragma unroll
    for (int half = 0; half < 4; half += 2) {
      float most = z[half];
#pragma unroll
      for (int i = half; i < D / 2; i += 4) {
        most = fmaxf(most, fmaxf(z[i], z[i + 1]));
      }
      const float base = -quad_max(most) * kLog2OfE;
      float sum = 0.0F;
#pragma unroll
      for (int i = half; i < D / 2; i += 4) {
        z[i] = exp2_fast(fmaf(z[i], kLog2OfE, base));
        z[i + 1] = exp2_fast(fmaf(z[i + 1], kLog2OfE, base));
        sum += z[i] + z[i + 1];
      }
      const float factor = 1.0F / quad_sum(sum);
#pragma unroll
      for (int i = half; i < D / 2; i += 4) {
        z[i] *= factor;
        z[i + 1] *= factor;
      }
    }
  }

  // The eight rows and four words of a warp's write lie in different banks.
  static __device__ void write(BFloat16* tile, const float (&y)[D / 2]) {
#pragma unroll
    for (int i = 0; i < D / 4; ++i) {
      const int at =
          swizzled_offset(kFeatureTokens, own_row() + i % 2 * 8, i / 2 * 8) + own_column();
      *reinterpret_cast<std::uint32_t*>(tile + at) = pack_bfloat16(y[2 * i], y[2 * i + 1]);
    }
  }

  const ForwardMaps& maps_;
  ForwardMemory<D>& memory_;
  const int head_, x_head_, slot_, slots_;
  const int tiles_;  // of this block
};

template <int D>
__global__ void __launch_bounds__(ForwardShape<D>::kThreads, ForwardShape<D>::kBlocks)
    forward_kernel(const __grid_constant__ ForwardArgs args,
                   const __grid_constant__ ForwardMaps maps) {
#if BIFOCAL_HOPPER_CODE
  FeatureForward<D>(args, maps, *reinterpret_cast<ForwardMemory<D>*>(swizzle_memory())).run();
#endif
}

template <int D>
void launch(CudaStream& stream, const FeatureMapArrays<BFloat16>& a) {
  using Shape = ForwardShape<D>;
  const ForwardMaps maps{.x = map_tokens(a.x, a.tokens, a.x_heads, D),
                         .weight = map_weight(a),
                         .y = map_tokens(a.y_out, a.tokens, a.heads, D)};
  const int slots = feature_slots(a.tokens, a.heads, Shape::kBlocks * num_multiprocessors());
  const ForwardArgs args{.heads = a.heads,
                         .repeats = a.heads / a.x_heads,
                         .tiles = static_cast<int>(ceil_div(a.tokens, kFeatureTokens)),
                         .slots = slots};
  launch_kernel(stream,
                grid_of(static_cast<std::int64_t>(slots) * a.heads),
                Shape::kThreads,
                static_cast<int>(sizeof(ForwardMemory<D>)) + kSwizzleAtomBytes,
                forward_kernel<D>,
                args,
                maps);
}

}  // namespace
}  // namespace hopper

void hopper_feature_map(CudaStream& stream, const FeatureMapArrays<BFloat16>& a) {
  a.dim == 64    ? hopper::launch<64>(stream, a)
  : a.dim == 128 ? hopper::launch<128>(stream, a)
                 : hopper::launch<256>(stream, a);
}

}  // namespace bifocal
