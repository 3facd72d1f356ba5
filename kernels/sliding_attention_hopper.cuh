// What the parts of Hopper's forward kernel share: sizes, the queue of work, shared memory.
//
// A block stays on its multiprocessor and takes items of work, 128 packed query rows each, until
// none is left. Its first warpgroup feeds: one warp draws items and says which keys they see, one
// thread has the copy engine bring queries, keys and values. The other two warpgroups multiply, 64
// rows each, both against the same tiles of keys.
#pragma once

#include <cstdint>

#include "kernels/attention_tile.cuh"
#include "kernels/wgmma.cuh"

namespace bifocal::hopper {

// For head width D.
template <int D>
struct ForwardShape {
  static constexpr int kRows = 2 * kGroupRows;       // of queries
  static constexpr int kKeys = D == 256 ? 64 : 128;  // of a tile
  static constexpr int kStages = D == 64 ? 4 : 2;    // tiles of keys in flight
  static constexpr int kSlots = D == 256 ? 1 : 2;    // tiles of queries
  static constexpr int kWorks = 2;                   // items known ahead
  static constexpr int kThreads = 3 * kGroupThreads;
  static constexpr int kColumnBlocks = D / kSwizzleColumns;
  static constexpr int kKeyBytes = kKeys * D * static_cast<int>(sizeof(BFloat16));
};

// An item: queries of one key-value head and the tiles of keys that they see, first those of pinned
// keys, then those of the window.
struct ForwardWork {
  int kv_head;  // -1: no more work
  int first_token;
  int pinned_tiles, tiles;
  int pinned_key, window_key;  // first keys of the first tiles
  // Of each token: the first key of its window, the pinned keys it sees.
  int begin[2 * kGroupRows], pinned_begin[2 * kGroupRows], pinned_end[2 * kGroupRows];
};

template <int D>
struct ForwardShared {
  using Shape = ForwardShape<D>;
  BFloat16 q[Shape::kSlots][Shape::kRows * D];
  BFloat16 k[Shape::kStages][Shape::kKeys * D];
  BFloat16 v[Shape::kStages][Shape::kKeys * D];
  ForwardWork work[Shape::kWorks];
  Barrier work_full[Shape::kWorks], work_empty[Shape::kWorks];
  Barrier q_full[Shape::kSlots], q_empty[Shape::kSlots];
  Barrier k_full[Shape::kStages], k_empty[Shape::kStages];
  Barrier v_full[Shape::kStages], v_empty[Shape::kStages];

  // By one thread.
  __device__ void init_barriers() {
    constexpr int kReaders = 8 * kWarpArrivals;  // warps that multiply
    init(work_full, kWarpArrivals);
    init(work_empty, kReaders + 1);
    init(q_full, 1);
    init(q_empty, kReaders);
    init(k_full, 1);
    init(k_empty, kReaders);
    init(v_full, 1);
    init(v_empty, kReaders);
    publish_barriers();
  }

 private:
  template <int N>
  static __device__ void init(Barrier (&barriers)[N], int arrivals) {
    for (Barrier& barrier : barriers) {
      barrier.init(arrivals);
    }
  }
};

struct ForwardMaps {
  CUtensorMap q, k, v, pinned_k, pinned_v;
};

struct ForwardProblem {
  AttentionArgs<BFloat16> args;
  int block_tokens;  // of an item: as many as give at most 128 packed rows
  int blocks;        // items of one key-value head
  int* drawn;        // items drawn so far by all blocks, beyond the first of each
  BFloat16* out;
  float* lse;

  __device__ int items() const { return blocks * args.kv_heads; }
};

// The warp that draws items. The last tokens of a key-value head go first: where windows reach far
// they see most keys, and short items at the end let all blocks finish together. Which block takes
// an item does not change its result.
template <int D>
__device__ void draw_work(const ForwardProblem& problem, ForwardShared<D>& shared) {
  using Shape = ForwardShape<D>;
  const AttentionArgs<BFloat16>& a = problem.args;
  const int lane = lane_id();
  const int items = problem.items();
  int item = static_cast<int>(blockIdx.x);
  for (RingPlace<Shape::kWorks> place;; place.advance()) {
    int next = 0;
    if (lane == 0) {
      next = static_cast<int>(gridDim.x) + atomicAdd(problem.drawn, 1);
    }
    shared.work_empty[place.stage].wait(place.parity ^ 1);
    ForwardWork& work = shared.work[place.stage];
    if (item >= items) {
      if (lane == 0) {
        work.kv_head = -1;
      }
      arrive_warp(shared.work_full[place.stage]);
      return;
    }
    const int first = (problem.blocks - 1 - item % problem.blocks) * problem.block_tokens;
    const int last = min(first + problem.block_tokens, a.tokens) - 1;
    KeySpan pinned{a.pinned, 0};
    for (int i = lane; i < problem.block_tokens; i += 32) {
      const int token = min(first + i, last);
      work.begin[i] = a.key_begin[token];
      if (a.pinned > 0) {
        const KeySpan span = pinned_span(a, token);
        work.pinned_begin[i] = span.begin;
        work.pinned_end[i] = span.end;
        if (span.begin < span.end) {
          pinned = {min(pinned.begin, span.begin), max(pinned.end, span.end)};
        }
      }
    }
    pinned.begin = __reduce_min_sync(0xffffffffU, pinned.begin);
    pinned.end = max(pinned.begin, __reduce_max_sync(0xffffffffU, pinned.end));
    if (lane == 0) {
      const int window = a.own() + last + 1 - work.begin[0];
      work.kv_head = item / problem.blocks;
      work.first_token = first;
      work.pinned_tiles = (pinned.end - pinned.begin + Shape::kKeys - 1) / Shape::kKeys;
      work.tiles = work.pinned_tiles + (window + Shape::kKeys - 1) / Shape::kKeys;
      work.pinned_key = pinned.begin;
      work.window_key = work.begin[0];
    }
    arrive_warp(shared.work_full[place.stage]);
    item = __shfl_sync(0xffffffffU, next, 0);
  }
}

// The thread that has the copy engine bring the items' tiles.
template <int D>
__device__ void load_work(const ForwardProblem& problem,
                          const ForwardMaps& maps,
                          ForwardShared<D>& shared) {
  using Shape = ForwardShape<D>;
  RingPlace<Shape::kSlots> slot;
  RingPlace<Shape::kStages> k_place;
  RingPlace<Shape::kStages> v_place;
  const auto load_keys =
      [](const CUtensorMap& map, BFloat16* to, Barrier& full, int head, int key) {
        full.arrive_expect(Shape::kKeyBytes);
#pragma unroll
        for (int i = 0; i < Shape::kColumnBlocks; ++i) {
          load_box(
              to + i * Shape::kKeys * kSwizzleColumns, map, full, i * kSwizzleColumns, head, key);
        }
      };
  for (RingPlace<Shape::kWorks> place;; place.advance()) {
    shared.work_full[place.stage].wait(place.parity);
    const ForwardWork& work = shared.work[place.stage];
    const int kv_head = work.kv_head;
    if (kv_head < 0) {
      return;
    }
    const int first_token = work.first_token;
    const int pinned_tiles = work.pinned_tiles;
    const int tiles = work.tiles;
    const int pinned_key = work.pinned_key;
    const int window_key = work.window_key - pinned_tiles * Shape::kKeys;
    shared.work_empty[place.stage].arrive();

    shared.q_empty[slot.stage].wait(slot.parity ^ 1);
    Barrier& q_full = shared.q_full[slot.stage];
    const int rows = problem.block_tokens * problem.args.group;
    q_full.arrive_expect(rows * D * static_cast<int>(sizeof(BFloat16)));
#pragma unroll
    for (int i = 0; i < Shape::kColumnBlocks; ++i) {
      load_box(shared.q[slot.stage] + i * Shape::kRows * kSwizzleColumns,
               maps.q,
               q_full,
               i * kSwizzleColumns,
               kv_head * problem.args.group,
               first_token);
    }
    slot.advance();

    // A tile's values are wanted after the next tile's keys.
    for (int i = 0; i <= tiles; ++i) {
      if (i < tiles) {
        const bool is_pinned = i < pinned_tiles;
        shared.k_empty[k_place.stage].wait(k_place.parity ^ 1);
        load_keys(is_pinned ? maps.pinned_k : maps.k,
                  shared.k[k_place.stage],
                  shared.k_full[k_place.stage],
                  kv_head,
                  (is_pinned ? pinned_key : window_key) + i * Shape::kKeys);
        k_place.advance();
      }
      if (i > 0) {
        const bool is_pinned = i - 1 < pinned_tiles;
        shared.v_empty[v_place.stage].wait(v_place.parity ^ 1);
        load_keys(is_pinned ? maps.pinned_v : maps.v,
                  shared.v[v_place.stage],
                  shared.v_full[v_place.stage],
                  kv_head,
                  (is_pinned ? pinned_key : window_key) + (i - 1) * Shape::kKeys);
        v_place.advance();
      }
    }
  }
}

}  // namespace bifocal::hopper
