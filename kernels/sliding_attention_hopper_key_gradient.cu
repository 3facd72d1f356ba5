// Sliding attention on Hopper, gradients of the window's keys and values. A block takes 128 keys of
// a head at a time, 64 for each of two warpgroups, and goes through the tiles of query rows that
// see some of them, in order; a third warpgroup has the copy engine bring those. Products are made
// transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are left factors of dV += P^T dO
// and dK += dS^T Q where they are, in registers. The query heads of a key-value head are rows of
// one tile, which adds them up.
#include <algorithm>

#include "kernels/attention_tile.cuh"
#include "kernels/launch.cuh"
#include "kernels/sliding_attention_hopper_backward.cuh"
#include "kernels/wgmma.cuh"

namespace bifocal::hopper {
namespace {

constexpr int kStages = 4;

struct KeyMaps {
  CUtensorMap q, d_out, k, v, d_k, d_v;
};

struct KeyBarriers {
  Barrier keys_full[kConsumers], keys_empty[kConsumers];
  Barrier rows_full[kStages], rows_empty[kStages];
};

template <int D>
struct KeyMemory {
  static constexpr int kTile = kGroupRows * D;  // of rows and of keys
  static constexpr int kElements = 2 * (kConsumers + kStages) * kTile;
  static constexpr int kValues = 4 * kGroupRows;  // of the rows of a stage
  static constexpr int kBytes = kElements * static_cast<int>(sizeof(BFloat16)) +
                                kStages * kValues * static_cast<int>(sizeof(float)) +
                                static_cast<int>(sizeof(KeyBarriers)) + kSwizzleAtomBytes;
  BFloat16* first;

  __device__ BFloat16* k(int consumer) const { return first + 2 * consumer * kTile; }

  __device__ BFloat16* v(int consumer) const { return k(consumer) + kTile; }

  __device__ BFloat16* q(int stage) const { return k(kConsumers + stage); }

  __device__ BFloat16* d_out(int stage) const { return q(stage) + kTile; }

  // [lse, delta][64]
  __device__ float* statistics(int stage) const {
    return reinterpret_cast<float*>(first + kElements) + stage * kValues;
  }

  // [begin, end][64]
  __device__ std::int32_t* spans(int stage) const {
    return reinterpret_cast<std::int32_t*>(statistics(stage) + 2 * kGroupRows);
  }

  __device__ KeyBarriers& barriers() const {
    return *reinterpret_cast<KeyBarriers*>(statistics(kStages));
  }
};

}  // namespace

// 128 keys of a key-value head and the tiles of rows they go through.
struct KeyWork {
  int kv_head, block;
  int2 tiles[kConsumers];  // that see some of a warpgroup's keys; empty where x >= y

  __device__ KeyWork(const AttentionArgs<BFloat16>& a, const BackwardRows& rows, int index)
      : kv_head(index % a.kv_heads), block(index / a.kv_heads) {
#pragma unroll
    for (int i = 0; i < kConsumers; ++i) {
      tiles[i] = rows.tiles_of_keys[kConsumers * block + i];
    }
  }

  __device__ int first_key(int consumer) const {
    return block * kBlockKeys + consumer * kGroupRows;
  }

  // That see some of all the keys.
  __device__ int2 all_tiles() const {
    if (tiles[0].x >= tiles[0].y) {
      return tiles[1];
    }
    return tiles[1].x >= tiles[1].y ? tiles[0] : int2{tiles[0].x, tiles[1].y};
  }
};

namespace {

[[maybe_unused]] __device__ int key_blocks(const AttentionArgs<BFloat16>& a) {
  return (a.keys + kBlockKeys - 1) / kBlockKeys * a.kv_heads;
}

template <int D>
class KeyProducer {
 public:
  __device__ KeyProducer(const KeyMaps& maps,
                         const AttentionArgs<BFloat16>& a,
                         const BackwardRows& rows,
                         const KeyMemory<D>& memory)
      : maps_(maps), args_(a), rows_(rows), memory_(memory), barriers_(memory.barriers()) {}

  __device__ void run() {
    const int count = key_blocks(args_);
    const int step = static_cast<int>(gridDim.x);
    KeyWork work(args_, rows_, static_cast<int>(blockIdx.x));
    for (int index = static_cast<int>(blockIdx.x); index < count; index += step) {
      const KeyWork next(args_, rows_, index + step < count ? index + step : index);
      const int2 all = work.all_tiles();
      // The second warpgroup may be busy with the last keys while the first begins. One that needs
      // no rows wants its keys at once, since it lets rows pass only after them.
      const bool is_needed = work.tiles[1].x < work.tiles[1].y;
      const int second = is_needed ? work.tiles[1].x : all.x;
      load_keys(work, 0);
      load_rows(work, all.x, second);
      load_keys(work, 1);
      load_rows(work, second, all.y);
      parity_ ^= 1;
      work = next;
    }
  }

 private:
  __device__ void load_keys(const KeyWork& work, int consumer) {
    constexpr int kBytes = 2 * KeyMemory<D>::kTile * static_cast<int>(sizeof(BFloat16));
    Barrier& full = barriers_.keys_full[consumer];
    const int key = work.first_key(consumer);
    barriers_.keys_empty[consumer].wait(parity_ ^ 1);
    full.arrive_expect(kBytes);
    load_tile<D>(memory_.k(consumer), kGroupRows, maps_.k, full, work.kv_head, key);
    load_tile<D>(memory_.v(consumer), kGroupRows, maps_.v, full, work.kv_head, key);
  }

  __device__ void load_rows(const KeyWork& work, int begin, int end) {
    constexpr int kValueBytes = 2 * kGroupRows * static_cast<int>(sizeof(float));
    const int bytes =
        2 * rows_.rows_of_tile * D * static_cast<int>(sizeof(BFloat16)) + 2 * kValueBytes;
    const int head = work.kv_head * args_.group;
    for (int tile = begin; tile < end; ++tile) {
      const int stage = at_.stage;
      const int token = tile * rows_.tokens_of_tile;
      Barrier& full = barriers_.rows_full[stage];
      barriers_.rows_empty[stage].wait(at_.parity ^ 1);
      full.arrive_expect(bytes);
      load_tile<D>(memory_.q(stage), kGroupRows, maps_.q, full, head, token);
      load_bytes(memory_.statistics(stage),
                 rows_.statistics_of(tile, args_.kv_heads, work.kv_head),
                 kValueBytes,
                 full);
      load_bytes(memory_.spans(stage), rows_.spans_of(tile), kValueBytes, full);
      load_tile<D>(memory_.d_out(stage), kGroupRows, maps_.d_out, full, head, token);
      at_.advance();
    }
  }

  const KeyMaps& maps_;
  const AttentionArgs<BFloat16>& args_;
  const BackwardRows& rows_;
  const KeyMemory<D> memory_;
  KeyBarriers& barriers_;
  RingPlace<kStages> at_;
  int parity_ = 0;
};

// c = (64 keys of a) (64 rows of b)^T
template <int D>
__device__ void multiply_rows_of_tile(float (&c)[kGroupRows / 2],
                                      const BFloat16* a,
                                      const BFloat16* b) {
  const Operand left = Operand::by_rows(a);
  const Operand right = Operand::by_rows(b);
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    multiply<false, false>(
        c, left + row_step(kGroupRows, k), right + row_step(kGroupRows, k), k > 0);
  }
  commit_products();
}

// sum += a (64 rows of b)
template <int D>
__device__ void add_products(float (&sum)[D / 2],
                             const std::uint32_t (&a)[kGroupRows / 16][4],
                             const BFloat16* b) {
  begin_products();
  const Operand right = Operand::by_columns(b, kGroupRows);
#pragma unroll
  for (int k = 0; k < kGroupRows / 16; ++k) {
    multiply<true>(sum, a[k], right + column_step(k), true);
  }
  commit_products();
}

// The two values of this lane's columns 8 j to 8 j + 7.
template <class T>
__device__ Vector<T, 2> columns_of(const T* values, int j) {
  return load_vector<2>(values, 4 * j + lane_id() % 4);
}

// Products k q become probabilities, of rows that see the keys from `first_key` on or, masked,
// some.
template <bool Masked>
__device__ void make_probabilities(float (&s)[kGroupRows / 2],
                                   const float* lse,
                                   const std::int32_t* spans,
                                   int first_key,
                                   float scale) {
  const int key = first_key + warp_id() % 4 * 16 + lane_id() / 4;
#pragma unroll
  for (int j = 0; j < kGroupRows / 8; ++j) {
    const auto lse_pair = columns_of(lse, j);
    [[maybe_unused]] Vector<std::int32_t, 2> begin;
    [[maybe_unused]] Vector<std::int32_t, 2> end;
    if constexpr (Masked) {
      begin = columns_of(spans, j);
      end = columns_of(spans + kGroupRows, j);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& x = s[4 * j + e];
      x = exp2_fast(fmaf(x, scale, -lse_pair.element[e % 2]));
      if constexpr (Masked) {
        const KeySpan span{begin.element[e % 2], end.element[e % 2]};
        x = span.contains(key + e / 2 * 8) ? x : 0.0F;
      }
    }
  }
}

template <int D>
class KeyConsumer {
 public:
  __device__ KeyConsumer(const KeyMaps& maps,
                         const AttentionArgs<BFloat16>& a,
                         const BackwardRows& rows,
                         const KeyMemory<D>& memory)
      : maps_(maps),
        args_(a),
        rows_(rows),
        memory_(memory),
        barriers_(memory.barriers()),
        consumer_(static_cast<int>(threadIdx.x) / kGroupThreads - 1) {}

  __device__ void run() {
    const int count = key_blocks(args_);
    const int step = static_cast<int>(gridDim.x);
    for (int index = static_cast<int>(blockIdx.x); index < count; index += step) {
      const KeyWork work(args_, rows_, index);
      const int2 all = work.all_tiles();
      int2 own = consumer_ == 0 ? work.tiles[0] : work.tiles[1];
      own = own.x < own.y ? own : int2{all.x, all.x};
      pass(own.x - all.x);
      take(work, own.y - own.x);
      pass(all.y - own.y);
      parity_ ^= 1;
    }
  }

 private:
  // Tiles of rows that see keys of the other warpgroup alone.
  __device__ void pass(int tiles) {
    for (int i = 0; i < tiles; ++i) {
      barriers_.rows_full[at_.stage].wait(at_.parity);
      arrive_warp(barriers_.rows_empty[at_.stage]);
      at_.advance();
    }
  }

  __device__ void take(const KeyWork& work, int tiles) {
    const int first_key = work.first_key(consumer_);
    const float scale = args_.scale * kLog2OfE;
    float d_k[D / 2];
    float d_v[D / 2];
    float p[kGroupRows / 2];
    float dz[kGroupRows / 2];
    std::uint32_t p_factor[kGroupRows / 16][4];
    std::uint32_t dz_factor[kGroupRows / 16][4];
#pragma unroll
    for (int i = 0; i < D / 2; ++i) {
      d_k[i] = 0.0F;
      d_v[i] = 0.0F;
    }
    barriers_.keys_full[consumer_].wait(parity_);
    for (int i = 0; i < tiles; ++i) {
      const int stage = at_.stage;
      barriers_.rows_full[stage].wait(at_.parity);
      begin_products();
      multiply_rows_of_tile<D>(p, memory_.k(consumer_), memory_.q(stage));
      multiply_rows_of_tile<D>(dz, memory_.v(consumer_), memory_.d_out(stage));
      wait_products<1>();
      keep(p);
      if (i > 0) {  // the products of the tile before are done as well
        arrive_warp(barriers_.rows_empty[(stage + kStages - 1) % kStages]);
      }
      const float* statistics = memory_.statistics(stage);
      const std::int32_t* spans = memory_.spans(stage);
      const bool is_full =
          spans[kGroupRows - 1] <= first_key && first_key + kGroupRows <= spans[kGroupRows];
      if (is_full) {
        make_probabilities<false>(p, statistics, spans, first_key, scale);
      } else {
        make_probabilities<true>(p, statistics, spans, first_key, scale);
      }
      pack_factor(p_factor, p);
      add_products<D>(d_v, p_factor, memory_.d_out(stage));
      wait_products<1>();
      keep(dz);
#pragma unroll
      for (int j = 0; j < kGroupRows / 8; ++j) {
        const auto delta = columns_of(statistics + kGroupRows, j);
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          const std::uint32_t pair = p_factor[j / 2][j % 2 * 2 + e / 2];
          float* at = dz + 4 * j + e;
          at[0] = __uint_as_float(pair << 16) * (at[0] - delta.element[0]);
          at[1] = __uint_as_float(pair & 0xffff0000U) * (at[1] - delta.element[1]);
        }
      }
      pack_factor(dz_factor, dz);
      add_products<D>(d_k, dz_factor, memory_.q(stage));
      wait_products<1>();  // the registers of p_factor are free
      at_.advance();
    }
    wait_products<0>();
    keep(d_k);
    keep(d_v);
    if (tiles > 0) {
      arrive_warp(barriers_.rows_empty[(at_.stage + kStages - 1) % kStages]);
    }
    store(work, d_k, d_v);
  }

  // Through the tiles of k and v, which no product needs any more.
  __device__ void store(const KeyWork& work,
                        const float (&d_k)[D / 2],
                        const float (&d_v)[D / 2]) const {
    BFloat16* k = memory_.k(consumer_);
    BFloat16* v = memory_.v(consumer_);
    named_sync(1 + consumer_, kGroupThreads);
    put_tile<D>(k, d_k, args_.scale);
    put_tile<D>(v, d_v, 1.0F);
    publish_shared();
    named_sync(1 + consumer_, kGroupThreads);
    if (threadIdx.x % kGroupThreads == 0) {
      const int key = work.first_key(consumer_);
      store_tile<D>(maps_.d_k, k, kGroupRows, work.kv_head, key);
      store_tile<D>(maps_.d_v, v, kGroupRows, work.kv_head, key);
      commit_stores();
      wait_stores_read<0>();
      barriers_.keys_empty[consumer_].arrive();
    }
  }

  const KeyMaps& maps_;
  const AttentionArgs<BFloat16>& args_;
  const BackwardRows& rows_;
  const KeyMemory<D> memory_;
  KeyBarriers& barriers_;
  const int consumer_;
  RingPlace<kStages> at_;
  int parity_ = 0;
};

template <int D>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    key_gradient_kernel(const __grid_constant__ KeyMaps maps,
                        const AttentionArgs<BFloat16> a,
                        const BackwardRows rows) {
#if BIFOCAL_HOPPER_CODE
  const KeyMemory<D> memory{reinterpret_cast<BFloat16*>(swizzle_memory())};
  KeyBarriers& barriers = memory.barriers();
  for (int stage = 0; stage < kStages; ++stage) {
    clear_unused_rows<D>(memory.q(stage), rows.rows_of_tile);
    clear_unused_rows<D>(memory.d_out(stage), rows.rows_of_tile);
  }
  publish_shared();
  if (threadIdx.x == 0) {
    constexpr int kWarps = kGroupThreads / 32;
    for (int i = 0; i < kConsumers; ++i) {
      barriers.keys_full[i].init(1);
      barriers.keys_empty[i].init(1);
    }
    for (int i = 0; i < kStages; ++i) {
      barriers.rows_full[i].init(1);
      barriers.rows_empty[i].init(kConsumers * kWarps * kWarpArrivals);
    }
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    lower_registers<kProducerRegisters>();
    if (threadIdx.x == 0) {
      KeyProducer<D>(maps, a, rows, memory).run();
    }
  } else {
    raise_registers<kConsumerRegisters>();
    KeyConsumer<D>(maps, a, rows, memory).run();
  }
#endif
}

template <int D>
void launch(CudaStream& stream,
            const AttentionArgs<BFloat16>& a,
            const AttentionGradients<BFloat16>& g,
            const BackwardRows& rows) {
  const KeyMaps maps{.q = map_of_rows(a, rows, a.q),
                     .d_out = map_of_rows(a, rows, g.d_out),
                     .k = map_of_keys(a, a.k, a.keys, kGroupRows),
                     .v = map_of_keys(a, a.v, a.keys, kGroupRows),
                     .d_k = map_of_keys(a, g.d_k, a.keys, kGroupRows),
                     .d_v = map_of_keys(a, g.d_v, a.keys, kGroupRows)};
  const std::int64_t count = ceil_div(a.keys, kBlockKeys) * a.kv_heads;
  launch_kernel(stream,
                grid_of(std::min<std::int64_t>(num_multiprocessors(), count)),
                kBackwardThreads,
                KeyMemory<D>::kBytes,
                key_gradient_kernel<D>,
                maps,
                a,
                rows);
}

}  // namespace

void differentiate_keys(CudaStream& stream,
                        const AttentionArgs<BFloat16>& a,
                        const AttentionGradients<BFloat16>& g,
                        const BackwardRows& rows) {
  if (a.dim == 64) {
    launch<64>(stream, a, g, rows);
  } else {
    launch<128>(stream, a, g, rows);
  }
}

}  // namespace bifocal::hopper
