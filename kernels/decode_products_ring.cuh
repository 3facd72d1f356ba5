// The two ends of a ring of weight rows in shared memory, for products of a few rows on Hopper: the
// warp that copies rows in, and the warps that add up and store what other warps made of them.
#pragma once

#include "kernels/decode_products.cuh"
#include "kernels/dependent.cuh"
#include "kernels/hopper.cuh"
#include "kernels/warp.cuh"

namespace bifocal::product_ring {

using Args = ProductArgs<BFloat16, BFloat16>;

inline constexpr int kPieceNumbers =
    kWarp * kVectorSize<BFloat16>;     // that a warp takes in one access
inline constexpr int kMostPieces = 4;  // of a row in a lane
inline constexpr int kMostWarps = 12;
inline constexpr int kStoreWarps = 3;
inline constexpr int kServiceWarps = 1 + kStoreWarps;
inline constexpr int kMostThreads = (kMostWarps + kServiceWarps) * kWarp;
inline constexpr int kMostStages = 6;
inline constexpr int kTicketsAhead = 3;

// Rows of weights in a stage of the ring, and the outputs that they make.
template <int kPieces, bool kGated>
struct Stage {
  static constexpr int kRows = kPieces <= 2 ? 4 : (kGated ? 2 : 1);
  static constexpr int kOutputs = kGated ? kRows / 2 : kRows;
  static_assert(kOutputs >= 1);
};

#if BIFOCAL_HOPPER_CODE

// Long rows make few stages: a next kernel's ring that fills beside them delays more than it gains.
template <int kPieces>
inline constexpr bool kStartsNextLate = kPieces > 2;

template <int kSums, int kInputs>
struct Shared {
  hopper::Barrier full[kMostStages];   // the stage's rows have come
  hopper::Barrier read[kMostStages];   // all warps have left their sums
  hopper::Barrier taken[kMostStages];  // the sums have been added
  int first[kMostStages];              // output that the stage's rows begin with; -1: the end
  float sums[kMostStages][kSums][kMostWarps];
  float squares[kInputs][kMostWarps];
};

// Which tiles of outputs a block takes: first as many as every block, one behind the other; the
// rest go to who comes first, because multiprocessors do not reach memory equally fast. Tickets for
// them are drawn ahead. The last ticket of all resets the counter for the launch that has it next.
struct Tiles {
  int begin, fixed, shared_begin, shared_count;
  unsigned last_ticket;

  __device__ explicit Tiles(int tiles) : fixed(tiles * 3 / (static_cast<int>(gridDim.x) * 4)) {
    const int blocks = static_cast<int>(gridDim.x);
    begin = fixed * static_cast<int>(blockIdx.x);
    shared_begin = fixed * blocks;
    shared_count = tiles - shared_begin;
    last_ticket = static_cast<unsigned>(shared_count + kTicketsAhead * blocks - 1);
  }
};

// Row `row` of the weights of the stage that begins with this output; null past the last.
template <bool kGated>
const __device__ BFloat16* weight_row(const Args& a, int first, int row) {
  const int output = first + (kGated ? row / 2 : row);
  if (output >= a.outputs) {
    return nullptr;
  }
  if constexpr (kGated) {
    return (row % 2 == 0 ? a.gate : a.up) + static_cast<std::int64_t>(output) * a.in;
  }
  int part = 0;
  while (part + 1 < a.parts && output >= a.part[part + 1].begin) {
    ++part;
  }
  return a.part[part].weight + static_cast<std::int64_t>(output - a.part[part].begin) * a.in;
}

template <int kPieces, bool kGated, class S>
__device__ inline void copy_rows(
    const Args& a, const Tiles& tiles, S& shared, BFloat16* ring, int stages, unsigned* counter) {
  using Of = Stage<kPieces, kGated>;
  const int lane = lane_id();
  const int bytes = a.in * static_cast<int>(sizeof(BFloat16));
  const auto row_of = [&](int tile) {
    return lane < Of::kRows ? weight_row<kGated>(a, tile * Of::kOutputs, lane) : nullptr;
  };
  unsigned ticket[kTicketsAhead] = {};
  int stage = 0;
  int round = 0;
  const auto wait_taken = [&] {
    if (round > 0) {
      shared.taken[stage].wait((round - 1) & 1);
    }
  };
  const auto advance = [&] {
    if (++stage == stages) {
      stage = 0;
      ++round;
    }
  };
  const auto copy_tile = [&](int tile) {
    wait_taken();
    const BFloat16* from = row_of(tile);
    const int rows = __popc(__ballot_sync(kAllLanes, from != nullptr));
    if (lane == 0) {
      shared.first[stage] = tile * Of::kOutputs;
      shared.full[stage].arrive_expect(rows * bytes);
    }
    __syncwarp();
    if (from != nullptr) {
      hopper::load_bytes(ring + (stage * Of::kRows + lane) * a.in, from, bytes, shared.full[stage]);
    }
    advance();
  };
  const auto draw = [&] { return lane == 0 ? atomicAdd(counter, 1U) : 0U; };
  for (int turn = 0; turn < tiles.fixed; ++turn) {
    if (turn == tiles.fixed - 1) {
#pragma unroll
      for (unsigned& each : ticket) {
        each = draw();
      }
    }
    copy_tile(tiles.begin + turn);
  }
  if (tiles.fixed == 0) {
#pragma unroll
    for (unsigned& each : ticket) {
      each = draw();
    }
  }
  while (true) {
    const unsigned taken = __shfl_sync(kAllLanes, ticket[0], 0);
    if (taken >= static_cast<unsigned>(tiles.shared_count)) {
      break;
    }
#pragma unroll
    for (int i = 0; i + 1 < kTicketsAhead; ++i) {
      ticket[i] = ticket[i + 1];
    }
    ticket[kTicketsAhead - 1] = draw();
    copy_tile(tiles.shared_begin + static_cast<int>(taken));
  }
  if (kStartsNextLate<kPieces>) {
    let_kernel_after_start();
  }
  for (int end = 0; end < min(kStoreWarps, stages); ++end) {  // one for each warp that stores
    wait_taken();
    if (lane == 0) {
      shared.first[stage] = -1;
      shared.full[stage].arrive();
    }
    advance();
  }
#pragma unroll
  for (const unsigned each : ticket) {
    if (lane == 0 && each == tiles.last_ticket) {
      *counter = 0;
    }
  }
}

// What is added to an output before it is stored.
struct Extra {
  float bias = 0.0F;
  float add = 0.0F;
};

struct Output {
  const ProductPart<BFloat16, BFloat16>* part = nullptr;
  std::int64_t at = 0;
  int local = 0;

  __device__ Output(const Args& a, int output, int row) {
    int index = 0;
    while (index + 1 < a.parts && output >= a.part[index + 1].begin) {
      ++index;
    }
    part = &a.part[index];
    local = output - part->begin;
    at = static_cast<std::int64_t>(row) * part->out + local;
  }

  __device__ Extra extra() const {
    Extra extra;
    if (part->bias != nullptr) {
      extra.bias = load_float(part->bias[local]);
    }
    if (part->add != nullptr) {
      extra.add = part->is_wide ? static_cast<const float*>(part->add)[at]
                                : load_float(static_cast<const BFloat16*>(part->add)[at]);
    }
    return extra;
  }

  __device__ void store(float sum) const {
    if (part->is_wide) {
      static_cast<float*>(part->y)[at] = sum;
    } else {
      static_cast<BFloat16*>(part->y)[at] = store_as<BFloat16>(sum);
    }
  }
};

// A lane for each output of a stage and row of x. Warps take turns in the stages.
template <int kPieces, int kInputs, bool kGated, class S>
__device__ inline void store_outputs(const Args& a, S& shared, int stages, int warps) {
  using Of = Stage<kPieces, kGated>;
  const int lane = lane_id();
  const int index = lane / kInputs;
  const int row = lane % kInputs;
  const bool is_mine = index < Of::kOutputs && row < a.rows;
  wait_for_kernel_before();
  int stage = 0;
  int parity = 0;
  const auto advance = [&](int turns) {
    stage += turns;
    if (stage >= stages) {
      stage -= stages;
      parity ^= 1;
    }
  };
  // With fewer stages a warp could take an older phase of a barrier for its own.
  const int writers = min(kStoreWarps, stages);
  const int first_turn = warp_id() - warps - 1;
  if (first_turn >= writers) {
    return;
  }
  advance(first_turn);
  while (true) {
    shared.full[stage].wait(parity);
    const int first = shared.first[stage];
    if (first < 0) {
      break;
    }
    const int output = first + index;
    const bool is_stored = is_mine && output < a.outputs;
    const Output place(a, is_stored && !kGated ? output : 0, row);
    const Extra extra = is_stored && !kGated ? place.extra() : Extra{};
    shared.read[stage].wait(parity);
    const auto total = [&](int weight_row) {
      const float* sums = shared.sums[stage][weight_row * kInputs + row];
      float sum = sums[0];
      for (int warp = 1; warp < warps; ++warp) {
        sum += sums[warp];
      }
      return sum;
    };
    float sum = 0.0F;
    if (is_mine) {
      if constexpr (kGated) {
        const float gate = total(2 * index);
        sum = gate / (1.0F + expf(-gate)) * total(2 * index + 1);
      } else {
        sum = total(index) + extra.bias + extra.add;
      }
    }
    __syncwarp();
    if (lane == 0) {
      shared.taken[stage].arrive();
    }
    if (is_stored) {
      if constexpr (kGated) {
        a.gated[static_cast<std::int64_t>(row) * a.outputs + output] = store_as<BFloat16>(sum);
      } else {
        place.store(sum);
      }
    }
    advance(writers);
  }
  if (lane == 0) {
    shared.taken[stage].arrive();
  }
}

#endif

}  // namespace bifocal::product_ring
