// Sliding attention on Hopper, gradient of the queries. A block takes two tiles of query rows at a
// time, one for each of two warpgroups, and goes through their keys in tiles of 96; a third
// warpgroup has the copy engine bring what they need, of the next rows too. A warpgroup makes
// S = Q K^T and dP = dO V^T, dS = P (dP - delta) in registers, and adds dS K to dQ there. Its
// exponentials run while dP is made, and the other warpgroup's products fill the rest.
#include <algorithm>

#include "kernels/attention_tile.cuh"
#include "kernels/launch.cuh"
#include "kernels/sliding_attention_hopper_backward.cuh"
#include "kernels/wgmma.cuh"

namespace bifocal::hopper {
namespace {

constexpr int kKeys = 96;  // of a tile
constexpr int kKStages = 3;
constexpr int kVStages = 2;  // V is done with before K

struct QueryMaps {
  CUtensorMap q, d_out, d_q, k, v, pinned_k, pinned_v;
};

struct QueryBarriers {
  Barrier rows_full[kConsumers], rows_empty[kConsumers];
  Barrier k_full[kKStages], k_empty[kKStages];
  Barrier v_full[kVStages], v_empty[kVStages];
};

template <int D>
struct QueryMemory {
  static constexpr int kRowTile = kGroupRows * D;
  static constexpr int kKeyTile = kKeys * D;
  static constexpr int kElements = 3 * kConsumers * kRowTile + (kKStages + kVStages) * kKeyTile;
  static constexpr int kBytes = kElements * static_cast<int>(sizeof(BFloat16)) +
                                static_cast<int>(sizeof(QueryBarriers)) + kSwizzleAtomBytes;
  BFloat16* first;

  __device__ BFloat16* q(int consumer) const { return first + 3 * consumer * kRowTile; }

  __device__ BFloat16* d_out(int consumer) const { return q(consumer) + kRowTile; }

  __device__ BFloat16* d_q(int consumer) const { return q(consumer) + 2 * kRowTile; }

  __device__ BFloat16* k(int stage) const {
    return first + 3 * kConsumers * kRowTile + stage * kKeyTile;
  }

  __device__ BFloat16* v(int stage) const { return k(kKStages + stage); }

  __device__ QueryBarriers& barriers() const {
    return *reinterpret_cast<QueryBarriers*>(first + kElements);
  }
};

}  // namespace

// Two tiles of rows of a key-value head and the keys they go through, as one warpgroup sees them:
// first tiles of pinned keys, then of the window's. What is loaded is not looked at before it is
// asked for, so that the next work may load while this one is done.
struct QueryWork {
  int kv_head, pair;
  int window_begin;  // of both tiles
  int full_begin;    // every row of the warpgroup's tile sees keys from here to full_end()
  int2 pinned;

  __device__ QueryWork(const AttentionArgs<BFloat16>& a,
                       const BackwardRows& rows,
                       int index,
                       int consumer)
      : kv_head(index % a.kv_heads),
        // The last rows see most keys where windows are full: they go first.
        pair(rows.pairs() - 1 - index / a.kv_heads),
        window_begin(rows.spans_of(2 * pair)[0]),
        full_begin(rows.spans_of(2 * pair + consumer)[kGroupRows - 1]),
        pinned(rows.pinned_of_pair == nullptr ? int2{0, 0} : rows.pinned_of_pair[pair]) {}

  __device__ int first_token(const BackwardRows& rows, int consumer) const {
    return (2 * pair + consumer) * rows.tokens_of_tile;
  }

  __device__ int pinned_tiles() const { return (pinned.y - pinned.x + kKeys - 1) / kKeys; }

  __device__ int tiles(const AttentionArgs<BFloat16>& a, const BackwardRows& rows) const {
    const int window_end = a.own() + min(first_token(rows, kConsumers), a.tokens);
    return pinned_tiles() + (window_end - window_begin + kKeys - 1) / kKeys;
  }

  __device__ int first_key(int tile) const {
    const int window_tile = tile - pinned_tiles();
    return window_tile < 0 ? pinned.x + tile * kKeys : window_begin + window_tile * kKeys;
  }
};

// What a thread keeps of its two rows.
struct RowValues {
  float lse[2], delta[2];
  KeySpan window[2];

  __device__ RowValues(const BackwardRows& rows, int kv_heads, const QueryWork& work, int tile) {
    const float* statistics = rows.statistics_of(tile, kv_heads, work.kv_head);
    const std::int32_t* spans = rows.spans_of(tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_id() % 4 * 16 + half * 8 + lane_id() / 4;
      lse[half] = statistics[row];
      delta[half] = statistics[kGroupRows + row];
      window[half] = {spans[row], spans[kGroupRows + row]};
    }
  }

  // The spans in a tile of pinned keys.
  __device__ void load_pinned(const AttentionArgs<BFloat16>& a,
                              int first_token,
                              KeySpan (&spans)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_id() % 4 * 16 + half * 8 + lane_id() / 4;
      spans[half] = pinned_span(a, min(first_token + row / a.group, a.tokens - 1));
    }
  }
};

namespace {

template <int D>
__device__ void produce(const QueryMaps& maps,
                        const AttentionArgs<BFloat16>& a,
                        const BackwardRows& rows,
                        const QueryMemory<D>& memory) {
  QueryBarriers& barriers = memory.barriers();
  constexpr int kTileBytes = QueryMemory<D>::kKeyTile * static_cast<int>(sizeof(BFloat16));
  const int row_bytes = 2 * rows.rows_of_tile * D * static_cast<int>(sizeof(BFloat16));
  const int count = rows.pairs() * a.kv_heads;
  const int step = static_cast<int>(gridDim.x);
  RingPlace<kKStages> k_at;
  RingPlace<kVStages> v_at;
  int parity = 0;
  QueryWork work(a, rows, static_cast<int>(blockIdx.x), 0);
  for (int index = static_cast<int>(blockIdx.x); index < count; index += step) {
    const QueryWork next(a, rows, index + step < count ? index + step : index, 0);
    const int tiles = work.tiles(a, rows);
    for (int i = 0; i < tiles; ++i) {
      const bool is_pinned = i < work.pinned_tiles();
      const int key = work.first_key(i);
      Barrier& k_full = barriers.k_full[k_at.stage];
      barriers.k_empty[k_at.stage].wait(k_at.parity ^ 1);
      k_full.arrive_expect(kTileBytes);
      load_tile<D>(memory.k(k_at.stage),
                   kKeys,
                   is_pinned ? maps.pinned_k : maps.k,
                   k_full,
                   work.kv_head,
                   key);
      k_at.advance();
      for (int consumer = 0; i == 0 && consumer < kConsumers; ++consumer) {
        const int head = work.kv_head * a.group;
        const int token = work.first_token(rows, consumer);
        Barrier& full = barriers.rows_full[consumer];
        barriers.rows_empty[consumer].wait(parity ^ 1);
        full.arrive_expect(row_bytes);
        load_tile<D>(memory.q(consumer), kGroupRows, maps.q, full, head, token);
        load_tile<D>(memory.d_out(consumer), kGroupRows, maps.d_out, full, head, token);
      }
      Barrier& v_full = barriers.v_full[v_at.stage];
      barriers.v_empty[v_at.stage].wait(v_at.parity ^ 1);
      v_full.arrive_expect(kTileBytes);
      load_tile<D>(memory.v(v_at.stage),
                   kKeys,
                   is_pinned ? maps.pinned_v : maps.v,
                   v_full,
                   work.kv_head,
                   key);
      v_at.advance();
    }
    parity ^= 1;
    work = next;
  }
}

// Zeros for the keys, from `first` on, that a row does not see.
[[maybe_unused]] __device__ void mask_keys(float (&p)[kKeys / 2],
                                           const KeySpan (&spans)[2],
                                           int first) {
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) {
    const int key = first + i / 4 * 8 + lane_id() % 4 * 2 + i % 2;
    p[i] = spans[i / 2 % 2].contains(key) ? p[i] : 0.0F;
  }
}

// c = (64 rows of a) (96 rows of b)^T
template <int D>
__device__ void multiply_keys(float (&c)[kKeys / 2], const BFloat16* a, const BFloat16* b) {
  const Operand left = Operand::by_rows(a);
  const Operand right = Operand::by_rows(b);
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    multiply<false, false>(c, left + row_step(kGroupRows, k), right + row_step(kKeys, k), k > 0);
  }
  commit_products();
}

template <int D>
class QueryConsumer {
 public:
  __device__ QueryConsumer(const QueryMaps& maps,
                           const AttentionArgs<BFloat16>& a,
                           const BackwardRows& rows,
                           const QueryMemory<D>& memory)
      : maps_(maps),
        args_(a),
        rows_(rows),
        memory_(memory),
        barriers_(memory.barriers()),
        consumer_(static_cast<int>(threadIdx.x) / kGroupThreads - 1) {}

  __device__ void run() {
    const int count = rows_.pairs() * args_.kv_heads;
    const int step = static_cast<int>(gridDim.x);
    QueryWork work(args_, rows_, static_cast<int>(blockIdx.x), consumer_);
    for (int index = static_cast<int>(blockIdx.x); index < count; index += step) {
      const QueryWork next(args_, rows_, index + step < count ? index + step : index, consumer_);
      take(work);
      work = next;
    }
    wait_stores_read<0>();
  }

 private:
  __device__ void take(const QueryWork& work) {
    const RowValues values(rows_, args_.kv_heads, work, 2 * work.pair + consumer_);
    const int tiles = work.tiles(args_, rows_);
    const float scale = args_.scale * kLog2OfE;
    float sum[D / 2];
    float p[kKeys / 2];
    float dz[kKeys / 2];
    std::uint32_t factor[kKeys / 16][4];
#pragma unroll
    for (float& x : sum) {
      x = 0.0F;
    }
    barriers_.rows_full[consumer_].wait(parity_);
    for (int i = 0; i < tiles; ++i) {
      const int k_stage = k_at_.stage;
      barriers_.k_full[k_stage].wait(k_at_.parity);
      begin_products();
      multiply_keys<D>(p, memory_.q(consumer_), memory_.k(k_stage));
      barriers_.v_full[v_at_.stage].wait(v_at_.parity);
      begin_products();
      multiply_keys<D>(dz, memory_.d_out(consumer_), memory_.v(v_at_.stage));
      wait_products<1>();
      keep(p);
      if (i > 0) {  // the products that added to dQ are done as well
        arrive_warp(barriers_.k_empty[(k_stage + kKStages - 1) % kKStages]);
      }
#pragma unroll
      for (int j = 0; j < kKeys / 2; ++j) {
        p[j] = exp2_fast(fmaf(p[j], scale, -values.lse[j / 2 % 2]));
      }
      mask(p, work, values, i);
      wait_products<0>();
      keep(dz);
      arrive_warp(barriers_.v_empty[v_at_.stage]);
      if (i == tiles - 1) {
        arrive_warp(barriers_.rows_empty[consumer_]);
      }
#pragma unroll
      for (int j = 0; j < kKeys / 2; ++j) {
        dz[j] = p[j] * (dz[j] - values.delta[j / 2 % 2]);
      }
      pack_factor(factor, dz);
      begin_products();
      const Operand keys = Operand::by_columns(memory_.k(k_stage), kKeys);
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) {
        multiply<true>(sum, factor[k], keys + column_step(k), true);
      }
      commit_products();
      k_at_.advance();
      v_at_.advance();
    }
    wait_products<0>();
    keep(sum);
    arrive_warp(barriers_.k_empty[(k_at_.stage + kKStages - 1) % kKStages]);
    parity_ ^= 1;
    store(work, sum);
  }

  __device__ void mask(float (&p)[kKeys / 2],
                       const QueryWork& work,
                       const RowValues& values,
                       int tile) const {
    const int first = work.first_key(tile);
    const int token = work.first_token(rows_, consumer_);
    if (tile < work.pinned_tiles()) {
      KeySpan spans[2];
      values.load_pinned(args_, token, spans);
      mask_keys(p, spans, first);
    } else if (first < work.full_begin || first + kKeys > args_.own() + token + 1) {
      mask_keys(p, values.window, first);
    }
  }

  __device__ void store(const QueryWork& work, const float (&sum)[D / 2]) const {
    BFloat16* tile = memory_.d_q(consumer_);
    const bool is_first = threadIdx.x % kGroupThreads == 0;
    if (is_first) {
      wait_stores_read<0>();
    }
    named_sync(1 + consumer_, kGroupThreads);
    put_tile<D>(tile, sum, args_.scale);
    publish_shared();
    named_sync(1 + consumer_, kGroupThreads);
    if (is_first) {
      store_tile<D>(maps_.d_q,
                    tile,
                    kGroupRows,
                    work.kv_head * args_.group,
                    work.first_token(rows_, consumer_));
      commit_stores();
    }
  }

  const QueryMaps& maps_;
  const AttentionArgs<BFloat16>& args_;
  const BackwardRows& rows_;
  const QueryMemory<D> memory_;
  QueryBarriers& barriers_;
  const int consumer_;
  RingPlace<kKStages> k_at_;
  RingPlace<kVStages> v_at_;
  int parity_ = 0;
};

template <int D>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    query_gradient_kernel(const __grid_constant__ QueryMaps maps,
                          const AttentionArgs<BFloat16> a,
                          const BackwardRows rows) {
#if BIFOCAL_HOPPER_CODE
  const QueryMemory<D> memory{reinterpret_cast<BFloat16*>(swizzle_memory())};
  QueryBarriers& barriers = memory.barriers();
  for (int consumer = 0; consumer < kConsumers; ++consumer) {
    clear_unused_rows<D>(memory.q(consumer), rows.rows_of_tile);
    clear_unused_rows<D>(memory.d_out(consumer), rows.rows_of_tile);
  }
  publish_shared();
  if (threadIdx.x == 0) {
    constexpr int kWarps = kGroupThreads / 32;
    for (int i = 0; i < kConsumers; ++i) {
      barriers.rows_full[i].init(1);
      barriers.rows_empty[i].init(kWarps * kWarpArrivals);
    }
    for (int i = 0; i < kKStages; ++i) {
      barriers.k_full[i].init(1);
      barriers.k_empty[i].init(kConsumers * kWarps * kWarpArrivals);
    }
    for (int i = 0; i < kVStages; ++i) {
      barriers.v_full[i].init(1);
      barriers.v_empty[i].init(kConsumers * kWarps * kWarpArrivals);
    }
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    lower_registers<kProducerRegisters>();
    if (threadIdx.x == 0) {
      produce<D>(maps, a, rows, memory);
    }
  } else {
    raise_registers<kConsumerRegisters>();
    QueryConsumer<D>(maps, a, rows, memory).run();
  }
#endif
}

template <int D>
void launch(CudaStream& stream,
            const AttentionArgs<BFloat16>& a,
            const AttentionGradients<BFloat16>& g,
            const BackwardRows& rows) {
  QueryMaps maps{.q = map_of_rows(a, rows, a.q),
                 .d_out = map_of_rows(a, rows, g.d_out),
                 .d_q = map_of_rows(a, rows, g.d_q),
                 .k = map_of_keys(a, a.k, a.keys, kKeys),
                 .v = map_of_keys(a, a.v, a.keys, kKeys),
                 .pinned_k = {},
                 .pinned_v = {}};
  if (a.pinned > 0) {
    maps.pinned_k = map_of_keys(a, a.pinned_k, a.pinned, kKeys);
    maps.pinned_v = map_of_keys(a, a.pinned_v, a.pinned, kKeys);
  }
  const int blocks = std::min(num_multiprocessors(), rows.pairs() * a.kv_heads);
  launch_kernel(stream,
                grid_of(blocks),
                kBackwardThreads,
                QueryMemory<D>::kBytes,
                query_gradient_kernel<D>,
                maps,
                a,
                rows);
}

}  // namespace

void differentiate_queries(CudaStream& stream,
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
