// Softmax features on Hopper, backward: one pass over y, d_y, x and d_x. A block owns columns of
// one head's weight and of its gradient, which stays in registers over all its tiles. d_z replaces
// y in shared memory, where both products read it: d_x += d_z weight, d_weight += d_z^T x.
#include "kernels/feature_map_hopper.cuh"

namespace bifocal {
namespace hopper {
namespace {

template <int D>
struct BackwardShape {
  static constexpr int kColumns = D == 64 ? 64 : 128;  // of the weight, for a block
  static constexpr int kParts = D / kColumns;          // blocks for a weight
  static constexpr int kGroups = kColumns / kSwizzleColumns;
  static constexpr int kThreads = kGroups * kGroupThreads;
  static constexpr int kStages = D == 256 ? 2 : 3;
  static constexpr int kGradientStages = D == 256 ? 1 : 3;  // of d_y, which is needed briefly
  static constexpr int kBlocks = D == 64 ? 2 : 1;           // of a multiprocessor
};

template <int D>
struct BackwardMemory {
  using Shape = BackwardShape<D>;

  static constexpr int kTile = kFeatureTokens * D;
  static constexpr int kPart = kFeatureTokens * Shape::kColumns;

  BFloat16 weight[D * Shape::kColumns];
  BFloat16 y[Shape::kStages][kTile];  // then d_z
  BFloat16 x[Shape::kStages][kPart];
  BFloat16 d_x[Shape::kStages][kPart];
  BFloat16 d_y[Shape::kGradientStages][kTile];
  Barrier weight_full;
  Barrier full[Shape::kStages];  // y, x, d_x
  Barrier d_y_full[Shape::kGradientStages];
};

struct BackwardMaps {
  CUtensorMap y, d_y, x, d_x, weight;
};

// One of the heads that read each x: number `reader` of `readers`.
struct BackwardArgs {
  int x_heads, readers, reader, tiles, slots;
  float* parts;  // [slots, heads, dim, dim]
};

template <int D>
class FeatureBackward {
 public:
  using Shape = BackwardShape<D>;
  using Shared = BackwardMemory<D>;

  __device__ FeatureBackward(const BackwardArgs& args, const BackwardMaps& maps, Shared& memory)
      : args_(args),
        maps_(maps),
        memory_(memory),
        column_(static_cast<int>(blockIdx.x) % Shape::kParts * Shape::kColumns),
        x_head_(static_cast<int>(blockIdx.x) / Shape::kParts % args.x_heads),
        head_(x_head_ * args.readers + args.reader),
        slot_(static_cast<int>(blockIdx.x) / Shape::kParts / args.x_heads),
        tiles_((args.tiles - slot_ + args.slots - 1) / args.slots),
        group_(warpgroup_id()) {}

  __device__ void run() {
    if (threadIdx.x == 0) {
      start();
    }
    __syncthreads();
    const bool leads = threadIdx.x % kGroupThreads == 0;
    float d_weight[kHeight][kSums];
#pragma unroll
    for (int i = 0; i < kHeight * kSums; ++i) {
      d_weight[i / kSums][i % kSums] = 0.0F;
    }
    memory_.weight_full.wait(0);
#pragma unroll 1
    for (int i = 0; i < tiles_; ++i) {
      const int stage = i % Shape::kStages;
      wait_tile(i);
      differentiate_softmax(memory_.y[stage], memory_.d_y[i % Shape::kGradientStages]);
      publish_shared();
      if (leads) {
        wait_stores_read<0>();  // of d_x of the last tile
      }
      __syncthreads();
      float d_x[kInputSums];
#pragma unroll
      for (auto& sums : d_weight) {
        keep(sums);
      }
      begin_products();
      multiply_weight(d_x, memory_.y[stage]);
      multiply_inputs(d_weight, memory_.y[stage], memory_.x[stage]);
      if (threadIdx.x == 0) {
        load_d_y(i + Shape::kGradientStages);
        if (i > 0) {
          load(i - 1 + Shape::kStages);
        }
      }
      __syncwarp();
      std::uint32_t held[kInputSums / 2];
#pragma unroll
      for (int pair = 0; pair < kInputSums / 2; ++pair) {
        held[pair] = pair_of(memory_.d_x[stage], pair);
      }
      wait_products<1>();
      keep(d_x);
      add(memory_.d_x[stage], held, d_x);
      publish_shared();
      named_sync(1 + group_, kGroupThreads);
      if (leads) {
        store(i);
      }
      __syncwarp();
      wait_products<0>();
#pragma unroll
      for (auto& sums : d_weight) {
        keep(sums);
      }
    }
    store_parts(d_weight);
    if (leads) {
      wait_stores_read<0>();
    }
  }

 private:
  // 64 features each, of a warpgroup.
  static constexpr int kHeight = D / kGroupRows / Shape::kGroups;

  // Numbers of a thread in a warpgroup's sums: 64 features by the block's columns, 64 tokens by 64
  // columns.
  static constexpr int kSums = Shape::kColumns / 2;
  static constexpr int kInputSums = kSwizzleColumns / 2;

  static __device__ constexpr int bytes_of(int elements) {
    return elements * static_cast<int>(sizeof(BFloat16));
  }

  __device__ void start() {
    memory_.weight_full.init(1);
    for (Barrier& full : memory_.full) {
      full.init(1);
    }
    for (Barrier& full : memory_.d_y_full) {
      full.init(1);
    }
    publish_barriers();
    memory_.weight_full.arrive_expect(bytes_of(D * Shape::kColumns));
    load_weight<D, Shape::kColumns>(
        memory_.weight, maps_.weight, memory_.weight_full, column_, head_);
    for (int i = 0; i < Shape::kStages; ++i) {
      load(i);
      if (i < Shape::kGradientStages) {
        load_d_y(i);
      }
    }
  }

  // The first token of the block's tile `i`.
  __device__ int token(int i) const {
    return (slot_ + i * args_.slots) * kFeatureTokens;
  }

  // By one thread, once the place is free; nothing past the last tile.
  __device__ void load(int i) {
    if (i >= tiles_) {
      return;
    }
    const int stage = i % Shape::kStages;
    Barrier& full = memory_.full[stage];
    full.arrive_expect(bytes_of(Shared::kTile + 2 * Shared::kPart));
    load_tokens<D>(memory_.y[stage], maps_.y, full, 0, head_, token(i));
    load_tokens<Shape::kColumns>(memory_.x[stage], maps_.x, full, column_, x_head_, token(i));
    load_tokens<Shape::kColumns>(memory_.d_x[stage], maps_.d_x, full, column_, x_head_, token(i));
  }

  // The same.
  __device__ void load_d_y(int i) {
    if (i >= tiles_) {
      return;
    }
    const int stage = i % Shape::kGradientStages;
    Barrier& full = memory_.d_y_full[stage];
    full.arrive_expect(bytes_of(Shared::kTile));
    load_tokens<D>(memory_.d_y[stage], maps_.d_y, full, 0, head_, token(i));
  }

  __device__ void wait_tile(int i) {
    memory_.full[i % Shape::kStages].wait(i / Shape::kStages % 2);
    memory_.d_y_full[i % Shape::kGradientStages].wait(i / Shape::kGradientStages % 2);
  }

  // d_z = y (d_y - <d_y, y>) over y. Some lanes share a row and go round it, each row's from a
  // start of its own, so that what eight lanes access together lies in different banks; the order
  // of columns does not matter.
  static __device__ void differentiate_softmax(BFloat16* y, const BFloat16* d_y) {
    constexpr int kLanes = Shape::kThreads / kFeatureTokens;  // of a row
    constexpr int kChunks = D / 8 / kLanes;
    constexpr int kHeld = kChunks <= 4 ? kChunks : 2;  // in registers; more are read twice
    const int row = static_cast<int>(threadIdx.x) / kLanes;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const auto place = [&](int k) {
      const int chunk = lane + kLanes * ((k + row) % kChunks);
      return chunk / 8 * kFeatureTokens * 8 + row * 8 + chunk % 8;
    };
    Packed<BFloat16> a[kHeld];
    Packed<BFloat16> b[kHeld];
    float mean = 0.0F;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      a[k % kHeld] = load_packed(y, place(k));
      b[k % kHeld] = load_packed(d_y, place(k));
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        mean = fmaf(a[k % kHeld][i], b[k % kHeld][i], mean);
      }
      if (kHeld < kChunks && k % kHeld == kHeld - 1) {
        asm volatile("" ::: "memory");  // no earlier loads of the next
      }
    }
    mean = warp_sum<kLanes>(mean);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (kHeld < kChunks) {
        a[k % kHeld] = load_packed(y, place(k));
        b[k % kHeld] = load_packed(d_y, place(k));
      }
      float d_z[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        d_z[i] = a[k % kHeld][i] * (b[k % kHeld][i] - mean);
      }
      store_packed(y, place(k), Packed<BFloat16>::of(d_z));
    }
  }

  // A warpgroup for each 64 columns.
  __device__ void multiply_weight(float (&d_x)[kInputSums], const BFloat16* d_z) const {
    const Operand left = Operand::by_rows(d_z);
    const Operand right = Operand::by_columns(memory_.weight + group_ * D * kSwizzleColumns, D);
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      multiply<false, true>(
          d_x, left + row_step(kFeatureTokens, step), right + column_step(step), step > 0);
    }
    commit_products();
  }

  // The warpgroup's first 64 features, of the `height`-th.
  __device__ int feature(int height) const {
    return (group_ * kHeight + height) * kGroupRows;
  }

  __device__ void multiply_inputs(float (&d_weight)[kHeight][kSums],
                                  const BFloat16* d_z,
                                  const BFloat16* x) const {
    const Operand right = Operand::by_columns(x, kFeatureTokens);
#pragma unroll
    for (int height = 0; height < kHeight; ++height) {
      const Operand left =
          Operand::by_columns(d_z + feature(height) * kFeatureTokens, kFeatureTokens);
#pragma unroll
      for (int step = 0; step < kFeatureTokens / 16; ++step) {
        multiply<true, true>(
            d_weight[height], left + column_step(step), right + column_step(step), true);
      }
    }
    commit_products();
  }

  // This thread's pair `i` of the warpgroup's 64 columns of d_x.
  __device__ std::uint32_t& pair_of(BFloat16* d_x, int i) const {
    const int column = group_ * kSwizzleColumns + i / 2 * 8;
    const int at = swizzled_offset(kFeatureTokens, own_row() + i % 2 * 8, column) + own_column();
    return *reinterpret_cast<std::uint32_t*>(d_x + at);
  }

  // Adds to what d_x held, rounded.
  __device__ void add(BFloat16* d_x,
                      const std::uint32_t (&held)[kInputSums / 2],
                      const float (&sums)[kInputSums]) const {
#pragma unroll
    for (int i = 0; i < kInputSums / 2; ++i) {
      pair_of(d_x, i) =
          pack_bfloat16(low_of(held[i]) + sums[2 * i], high_of(held[i]) + sums[2 * i + 1]);
    }
  }

  // The warpgroup's columns of d_x.
  __device__ void store(int i) const {
    const int column = group_ * kSwizzleColumns;
    store_box(maps_.d_x,
              memory_.d_x[i % Shape::kStages] + column * kFeatureTokens,
              column_ + column,
              x_head_,
              token(i));
    commit_stores();
  }

  __device__ void store_parts(const float (&d_weight)[kHeight][kSums]) const {
    const std::int64_t heads = static_cast<std::int64_t>(args_.x_heads) * args_.readers;
    float* to = args_.parts + (slot_ * heads + head_) * D * D + column_ + own_column();
#pragma unroll
    for (int height = 0; height < kHeight; ++height) {
#pragma unroll
      for (int i = 0; i < kSums / 2; ++i) {
        const int row = feature(height) + own_row() + i % 2 * 8;
        store_vector<2>(to + row * D + i / 2 * 8,
                        0,
                        Vector<float, 2>{{d_weight[height][2 * i], d_weight[height][2 * i + 1]}});
      }
    }
  }

  const BackwardArgs& args_;
  const BackwardMaps& maps_;
  Shared& memory_;
  const int column_, x_head_, head_, slot_;
  const int tiles_;  // of this block
  const int group_;
};

template <int D>
__global__ void __launch_bounds__(BackwardShape<D>::kThreads, BackwardShape<D>::kBlocks)
    backward_kernel(const __grid_constant__ BackwardArgs args,
                    const __grid_constant__ BackwardMaps maps) {
#if BIFOCAL_HOPPER_CODE
  FeatureBackward<D>(args, maps, *reinterpret_cast<BackwardMemory<D>*>(swizzle_memory())).run();
#endif
}

template <int D>
int backward_slots(const FeatureMapArrays<BFloat16>& a) {
  using Shape = BackwardShape<D>;
  return feature_slots(a.tokens, a.x_heads * Shape::kParts, Shape::kBlocks * num_multiprocessors());
}

// A launch for each of the heads that read an x: they add to the same d_x.
template <int D>
void launch(CudaStream& stream, const FeatureMapArrays<BFloat16>& a, float* parts) {
  using Shape = BackwardShape<D>;
  const BackwardMaps maps{.y = map_tokens(a.y, a.tokens, a.heads, D),
                          .d_y = map_tokens(a.d_y, a.tokens, a.heads, D),
                          .x = map_tokens(a.x, a.tokens, a.x_heads, D),
                          .d_x = map_tokens(a.d_x, a.tokens, a.x_heads, D),
                          .weight = map_weight(a)};
  BackwardArgs args{.x_heads = a.x_heads,
                    .readers = a.heads / a.x_heads,
                    .reader = 0,
                    .tiles = static_cast<int>(ceil_div(a.tokens, kFeatureTokens)),
                    .slots = backward_slots<D>(a),
                    .parts = parts};
  const std::int64_t blocks = static_cast<std::int64_t>(args.slots) * a.x_heads * Shape::kParts;
  for (; args.reader < args.readers; ++args.reader) {
    launch_kernel(stream,
                  grid_of(blocks),
                  Shape::kThreads,
                  static_cast<int>(sizeof(BackwardMemory<D>)) + kSwizzleAtomBytes,
                  backward_kernel<D>,
                  args,
                  maps);
  }
}

}  // namespace
}  // namespace hopper

std::int64_t hopper_feature_map_parts(const FeatureMapArrays<BFloat16>& a) {
  return a.dim == 64    ? hopper::backward_slots<64>(a)
         : a.dim == 128 ? hopper::backward_slots<128>(a)
                        : hopper::backward_slots<256>(a);
}

void hopper_feature_map_backward(CudaStream& stream,
                                 const FeatureMapArrays<BFloat16>& a,
                                 float* parts) {
  a.dim == 64    ? hopper::launch<64>(stream, a, parts)
  : a.dim == 128 ? hopper::launch<128>(stream, a, parts)
                 : hopper::launch<256>(stream, a, parts);
}

}  // namespace bifocal
