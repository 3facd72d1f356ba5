// Products of a few rows on Hopper: one block on each multiprocessor. The copy engine brings rows
// of the weights into a ring in shared memory. With one row of x two such blocks fit a
// multiprocessor, and the ring begins to fill while the kernel before runs, unless that one starts
// it late (kStartsNextLate, the mixer). Three quarters of the outputs are dealt out, the rest goes
// to who comes first: some multiprocessors reach memory a quarter slower than others, always the
// same ones.
//
// A warp takes the same columns of every row, with its part of x in registers. One warp copies;
// three take turns in adding the warps' sums and storing them. Sums go over a lane's numbers, lanes
// and warps in an order that neither the number of rows nor that of outputs nor the block changes.
#include <algorithm>
#include <atomic>

#include "kernels/decode_products_ring.cuh"
#include "kernels/kernel_choice.h"
#include "kernels/launch.cuh"
#include "kernels/warp.cuh"

namespace bifocal::product_ring {
namespace {

constexpr int kRingBytes = 108 * 1024;
constexpr int kCounters = 64;

[[maybe_unused]] __device__ unsigned
    counters[kCounters];  // of tickets; 0 between launches, which take turns in them:
// products of one stream at a time alone, as in a backend

#if BIFOCAL_HOPPER_CODE

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
    const Args& a, S& shared, const BFloat16* ring, int stages, int warps) {
  using Of = Stage<kPieces, kGated>;
  constexpr int kSums = Of::kRows * kInputs;
  const int warp = warp_id();
  const int lane = lane_id();
  Inputs<kPieces, kInputs> inputs(a, warps);
  inputs.load(a, shared, warps);
  int stage = 0;
  int parity = 0;
  const auto advance = [&] {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  };
  // Sums of a stage's rows over this lane's columns. False behind the last stage.
  const auto multiply = [&](float* sums) {
    shared.full[stage].wait(parity);
    if (shared.first[stage] < 0) {
      return false;
    }
    inputs.keep_packed();
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
    return true;
  };
  // Sums of two stages go over the lanes together, whose steps wait for each other.
  constexpr bool kPairs = kInputs == 1;
  constexpr int kAll = kPairs ? 2 * kSums : kSums;
  constexpr int kLanes = kWarp / kAll;  // that hold the same sum
  const int number = lane / kLanes;     // of the sum that this lane holds
  while (true) {
    float sums[kAll] = {};
    const int first_stage = stage;
    if (!multiply(sums)) {
      return;
    }
    advance();
    bool is_pair = false;
    const int second_stage = stage;
    if constexpr (kPairs) {
      is_pair = multiply(sums + kSums);
      if (is_pair) {
        advance();
      }
    }
    const float sum = sums_over_lanes(sums);
    const bool is_first = number < kSums;
    const bool is_mine = lane % kLanes == 0 && (is_first || is_pair);
    const int own = is_first ? first_stage : second_stage;
    if (is_mine) {
      shared.sums[own][is_first ? number : number - kSums][warp] = sum;
    }
    __syncwarp();
    if (is_mine && (number == 0 || number == kSums)) {
      shared.read[own].arrive();
    }
    if (kPairs && !is_pair) {
      return;
    }
  }
}

#endif

// One row leaves room for a block of the next kernel.
template <int kPieces, int kInputs, bool kGated>
__global__ void __launch_bounds__(kMostThreads, kInputs == 1 ? 2 : 1)
    hopper_product_kernel([[maybe_unused]] const __grid_constant__ Args a,
                          [[maybe_unused]] int stages,
                          [[maybe_unused]] int counter) {
#if BIFOCAL_HOPPER_CODE
  using Of = Stage<kPieces, kGated>;
  __shared__ Shared<Of::kRows * kInputs, kInputs> shared;
  auto* ring = reinterpret_cast<BFloat16*>(dynamic_shared());
  const int warps = static_cast<int>(blockDim.x) / kWarp - kServiceWarps;
  const int warp = warp_id();
  const Tiles tiles((a.outputs + Of::kOutputs - 1) / Of::kOutputs);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      shared.full[stage].init(1);
      shared.read[stage].init(warps);
      shared.taken[stage].init(1);
    }
    hopper::publish_barriers();
  }
  __syncthreads();
  if (!kStartsNextLate<kPieces>) {
    let_kernel_after_start();
  }
  if (warp == warps) {
    copy_rows<kPieces, kGated>(a, tiles, shared, ring, stages, &counters[counter]);
  } else if (warp > warps) {
    store_outputs<kPieces, kInputs, kGated>(a, shared, stages, warps);
  } else {
    multiply_rows<kPieces, kInputs, kGated>(a, shared, ring, stages, warps);
  }
#endif
}

int next_counter() {
  static std::atomic<unsigned> launches{0};
  return static_cast<int>(launches.fetch_add(1) % kCounters);
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
                   stages,
                   next_counter());
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
}  // namespace bifocal::product_ring

namespace bifocal {

std::int64_t hopper_product_rows(std::int64_t in) {
  const bool serves =
      product_ring::pieces_of(in) <= product_ring::kMostPieces && use_hopper_kernels();
  return serves ? product_ring::most_rows(product_ring::pieces_of(in)) : 0;
}

void hopper_products(CudaStream& stream,
                     const ProductArgs<BFloat16, BFloat16>& args,
                     bool is_gated) {
  is_gated ? product_ring::choose_pieces<true>(stream, args)
           : product_ring::choose_pieces<false>(stream, args);
}

}  // namespace bifocal
