// Products of a few rows on Hopper: one block on each multiprocessor, all with as many outputs. The
// copy engine brings rows of the weights into a ring in shared memory; that and as much again into
// the L2 cache begins before the kernel before has ended, so that memory does not rest between
// kernels. Two such blocks fit a multiprocessor.
//
// A warp takes the same columns of every row, with its part of x in registers. One warp copies, one
// adds the warps' sums and stores. Sums go over a lane's numbers, lanes and warps in an order that
// neither the number of rows nor that of outputs changes.
#include <algorithm>

#include "kernels/decode_products.cuh"
#include "kernels/dependent.cuh"
#include "kernels/hopper.cuh"
#include "kernels/kernel_choice.h"
#include "kernels/launch.cuh"
#include "kernels/warp.cuh"

namespace bifocal {
namespace {

using Args = ProductArgs<BFloat16, BFloat16>;

constexpr int kPieceNumbers = kWarp * kVectorSize<BFloat16>;  // that a warp takes in one access
constexpr int kMostPieces = 4;                                // of a row in a lane
constexpr int kMostWarps = 12;
constexpr int kServiceWarps = 2;
constexpr int kMostThreads = (kMostWarps + kServiceWarps) * kWarp;
constexpr int kMostStages = 6;
constexpr int kRingBytes = 108 * 1024;

// Rows of weights in a stage of the ring, and the outputs that they make.
template <int kPieces, bool kGated>
struct Stage {
  static constexpr int kRows = kPieces <= 2 ? 4 : (kGated ? 2 : 1);
  static constexpr int kOutputs = kGated ? kRows / 2 : kRows;
  static_assert(kOutputs >= 1);
};

#if BIFOCAL_HOPPER_CODE

constexpr int kCacheBytes = 64 * 1024;  // of each block, into the L2 cache ahead of the ring

template <int kSums, int kInputs>
struct Shared {
  hopper::Barrier full[kMostStages];   // the stage's rows have come
  hopper::Barrier read[kMostStages];   // all warps have left their sums
  hopper::Barrier taken[kMostStages];  // the sums have been added
  float sums[kMostStages][kSums][kMostWarps];
  float squares[kInputs][kMostWarps];
};

// A block's outputs.
struct Span {
  int begin, end;

  __device__ explicit Span(int outputs)
      : begin(static_cast<int>(static_cast<std::int64_t>(outputs) * blockIdx.x / gridDim.x)),
        end(static_cast<int>(static_cast<std::int64_t>(outputs) * (blockIdx.x + 1) / gridDim.x)) {}
};

__device__ inline void prefetch_bytes(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)),
               "r"(bytes)
               : "memory");
}

// Row `row` of the weights of the stage that begins with this output; null past the span.
template <bool kGated>
const __device__ BFloat16* weight_row(const Args& a, const Span& span, int first, int row) {
  const int output = first + (kGated ? row / 2 : row);
  if (output >= span.end) {
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
__device__ void copy_rows(
    const Args& a, const Span& span, S& shared, BFloat16* ring, int stages, int turns) {
  using Of = Stage<kPieces, kGated>;
  const int lane = lane_id();
  const int bytes = a.in * static_cast<int>(sizeof(BFloat16));
  const auto row_of = [&](int turn) {
    return lane < Of::kRows ? weight_row<kGated>(a, span, span.begin + turn * Of::kOutputs, lane)
                            : nullptr;
  };
  int stage = 0;
  int round = 0;
  for (int turn = 0; turn < turns; ++turn) {
    if (turn == stages) {
      const int ahead = min(turns, stages + kCacheBytes / (Of::kRows * bytes));
      for (int later = turn; later < ahead; ++later) {
        if (const BFloat16* from = row_of(later)) {
          prefetch_bytes(from, bytes);
        }
      }
    }
    if (round > 0) {
      shared.taken[stage].wait((round - 1) & 1);
    }
    const BFloat16* from = row_of(turn);
    const int rows = __popc(__ballot_sync(kAllLanes, from != nullptr));
    if (lane == 0) {
      shared.full[stage].arrive_expect(rows * bytes);
    }
    __syncwarp();
    if (from != nullptr) {
      hopper::load_bytes(ring + (stage * Of::kRows + lane) * a.in, from, bytes, shared.full[stage]);
    }
    if (++stage == stages) {
      stage = 0;
      ++round;
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

// A lane for each output of a stage and row of x.
template <int kPieces, int kInputs, bool kGated, class S>
__device__ void store_outputs(
    const Args& a, const Span& span, S& shared, int stages, int turns, int warps) {
  using Of = Stage<kPieces, kGated>;
  const int lane = lane_id();
  const int index = lane / kInputs;
  const int row = lane % kInputs;
  const bool is_mine = index < Of::kOutputs && row < a.rows;
  const auto output_of = [&](int turn) { return span.begin + turn * Of::kOutputs + index; };
  const auto extra_of = [&](int turn) {
    const int output = output_of(turn);
    return !kGated && is_mine && output < span.end ? Output(a, output, row).extra() : Extra{};
  };
  wait_for_kernel_before();
  Extra next = extra_of(0);
  int stage = 0;
  int parity = 0;
  for (int turn = 0; turn < turns; ++turn) {
    const Extra extra = next;
    next = extra_of(turn + 1);
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
    if (is_mine && output_of(turn) < span.end) {
      if constexpr (kGated) {
        a.gated[static_cast<std::int64_t>(row) * a.outputs + output_of(turn)] =
            store_as<BFloat16>(sum);
      } else {
        Output(a, output_of(turn), row).store(sum);
      }
    }
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// A lane's pieces of the rows of x, through the norm where there is one.
template <int kPieces, int kInputs>
struct Inputs {
  int at[kPieces];  // of each piece in a row
  bool there[kPieces];
  Packed<BFloat16> x[kInputs][kPieces];

  // The compiler keeps no floats of the rows across it, which take twice the registers.
  __device__ void keep_packed() {
#pragma unroll
    for (int row = 0; row < kInputs; ++row) {
      keep_packed(row);
    }
  }

  __device__ void keep_packed(int row) {
    if constexpr (kInputs > 2) {
#pragma unroll
      for (int word = 0; word < 4 * kPieces; ++word) {
        asm volatile("" : "+r"(x[row][word / 4].word[word % 4])::"memory");
      }
    }
  }

  __device__ Inputs(const Args& a, int warps) {
    const int warp = warp_id();
    const int lane = lane_id();
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      at[p] = (p * warps + warp) * kPieceNumbers + lane * kVectorSize<BFloat16>;
      there[p] = at[p] < a.in;
    }
  }

  __device__ Packed<BFloat16> piece(const BFloat16* row, int p) const {
    return there[p] ? load_packed(row + at[p], 0) : Packed<BFloat16>{};
  }

  template <class S>
  __device__ void load(const Args& a, S& shared, int warps) {
    Packed<BFloat16> norm[kPieces];
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      norm[p] = a.norm == nullptr ? Packed<BFloat16>{} : piece(a.norm, p);
    }
    wait_for_kernel_before();
#pragma unroll
    for (int row = 0; row < kInputs; ++row) {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        x[row][p] = row < a.rows ? piece(a.x + static_cast<std::int64_t>(row) * a.in, p)
                                 : Packed<BFloat16>{};
      }
    }
    if (a.norm == nullptr) {
      return;
    }
    const int warp = warp_id();
#pragma unroll
    for (int row = 0; row < kInputs; ++row) {
      float squares = 0.0F;
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
#pragma unroll
        for (int i = 0; i < kVectorSize<BFloat16>; ++i) {
          squares = fmaf(x[row][p][i], x[row][p][i], squares);
        }
      }
      keep_packed(row);
      squares = warp_sum(squares);
      if (lane_id() == 0) {
        shared.squares[row][warp] = squares;
      }
    }
    hopper::named_sync(1, warps * kWarp);
#pragma unroll
    for (int row = 0; row < kInputs; ++row) {
      float squares = 0.0F;
      for (int w = 0; w < warps; ++w) {
        squares += shared.squares[row][w];
      }
      const float inverse_rms = rsqrtf(squares / static_cast<float>(a.in) + a.eps);
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        float normed[kVectorSize<BFloat16>];
#pragma unroll
        for (int i = 0; i < kVectorSize<BFloat16>; ++i) {
          normed[i] = x[row][p][i] * inverse_rms * norm[p][i];
        }
        x[row][p] = Packed<BFloat16>::of(normed);
      }
      keep_packed(row);
    }
  }
};

template <int kPieces, int kInputs, bool kGated, class S>
__device__ void multiply_rows(
    const Args& a, S& shared, const BFloat16* ring, int stages, int turns, int warps) {
  using Of = Stage<kPieces, kGated>;
  constexpr int kSums = Of::kRows * kInputs;
  constexpr int kLanes = kWarp / kSums;  // that hold the same sum
  const int warp = warp_id();
  const int lane = lane_id();
  Inputs<kPieces, kInputs> inputs(a, warps);
  inputs.load(a, shared, warps);
  int stage = 0;
  int parity = 0;
  for (int turn = 0; turn < turns; ++turn) {
    shared.full[stage].wait(parity);
    inputs.keep_packed();
    float sums[kSums] = {};
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      Packed<BFloat16> weights[Of::kRows];
#pragma unroll
      for (int r = 0; r < Of::kRows; ++r) {
        weights[r] = inputs.piece(ring + (stage * Of::kRows + r) * a.in, p);
      }
#pragma unroll
      for (int i = 0; i < kVectorSize<BFloat16>; ++i) {
#pragma unroll
        for (int r = 0; r < Of::kRows; ++r) {
#pragma unroll
          for (int x = 0; x < kInputs; ++x) {
            sums[r * kInputs + x] = fmaf(weights[r][i], inputs.x[x][p][i], sums[r * kInputs + x]);
          }
        }
      }
    }
    const float sum = sums_over_lanes(sums);
    if (lane % kLanes == 0) {
      shared.sums[stage][lane / kLanes][warp] = sum;
    }
    __syncwarp();
    if (lane == 0) {
      shared.read[stage].arrive();
    }
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

#endif

// One row leaves room for a block of the next kernel.
template <int kPieces, int kInputs, bool kGated>
__global__ void __launch_bounds__(kMostThreads, kInputs == 1 ? 2 : 1)
    hopper_product_kernel([[maybe_unused]] const __grid_constant__ Args a,
                          [[maybe_unused]] int stages) {
#if BIFOCAL_HOPPER_CODE
  using Of = Stage<kPieces, kGated>;
  __shared__ Shared<Of::kRows * kInputs, kInputs> shared;
  auto* ring = reinterpret_cast<BFloat16*>(dynamic_shared());
  const int warps = static_cast<int>(blockDim.x) / kWarp - kServiceWarps;
  const int warp = warp_id();
  const Span span(a.outputs);
  const int turns = (span.end - span.begin + Of::kOutputs - 1) / Of::kOutputs;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      shared.full[stage].init(1);
      shared.read[stage].init(warps);
      shared.taken[stage].init(1);
    }
    hopper::publish_barriers();
  }
  __syncthreads();
  let_kernel_after_start();
  if (warp == warps) {
    copy_rows<kPieces, kGated>(a, span, shared, ring, stages, turns);
  } else if (warp > warps) {
    store_outputs<kPieces, kInputs, kGated>(a, span, shared, stages, turns, warps);
  } else {
    multiply_rows<kPieces, kInputs, kGated>(a, shared, ring, stages, turns, warps);
  }
#endif
}

template <int kPieces, int kInputs, bool kGated>
void launch(CudaStream& stream, const Args& a) {
  const int stage_bytes = Stage<kPieces, kGated>::kRows * a.in * static_cast<int>(sizeof(BFloat16));
  const int stages = std::min(kMostStages, kRingBytes / stage_bytes);
  const auto warps = static_cast<int>(ceil_div(a.in, kPieces * kPieceNumbers));
  const int blocks = std::min(device_traits(stream).multiprocessors, a.outputs);
  launch_dependent(stream,
                   dim3(static_cast<unsigned>(blocks)),
                   (warps + kServiceWarps) * kWarp,
                   stages * stage_bytes,
                   hopper_product_kernel<kPieces, kInputs, kGated>,
                   a,
                   stages);
}

// Rows whose inputs fit the registers.
constexpr int most_rows(int pieces) {
  return pieces == 1 ? 8 : 4;
}

template <int kPieces, bool kGated>
void choose_inputs(CudaStream& stream, const Args& a) {
  if (a.rows == 1) {
    launch<kPieces, 1, kGated>(stream, a);
  } else if (a.rows == 2) {
    launch<kPieces, 2, kGated>(stream, a);
  } else {
    launch<kPieces, most_rows(kPieces), kGated>(stream, a);
  }
}

int pieces_of(std::int64_t in) {
  return static_cast<int>(ceil_div(in, kMostWarps * kPieceNumbers));
}

template <bool kGated>
void choose_pieces(CudaStream& stream, const Args& a) {
  switch (pieces_of(a.in)) {
    case 1:
      return choose_inputs<1, kGated>(stream, a);
    case 2:
      return choose_inputs<2, kGated>(stream, a);
    case 3:
      return choose_inputs<3, kGated>(stream, a);
    default:
      return choose_inputs<kMostPieces, kGated>(stream, a);
  }
}

}  // namespace

std::int64_t hopper_product_rows(std::int64_t in) {
  const bool serves = pieces_of(in) <= kMostPieces && use_hopper_kernels();
  return serves ? most_rows(pieces_of(in)) : 0;
}

void hopper_products(CudaStream& stream, const Args& args, bool is_gated) {
  is_gated ? choose_pieces<true>(stream, args) : choose_pieces<false>(stream, args);
}

}  // namespace bifocal
