// The next token from logits. A row is cut into parts, a block each, in a chain of small kernels.
//
// Probabilities are whole numbers, round(2^shift exp((logit - largest) / temperature)), whose sum
// over a vocabulary stays below 2^62: sums of them are the same in any order, so histograms by
// atomics and sums by parts give one result. What is below 2^-43 of the largest counts as 0.
// top_k and top_p are one search: the largest key at which the ids of that key and above hold at
// least so many ids, or so much probability; a key is a logit as an ordered whole number. It takes
// three histograms of 11, 11 and 10 bits, each of the keys that agree with what is known so far.
// A kernel begins with the result of the histogram before it.
#include <algorithm>
#include <bit>

#include "kernels/device_scratch.h"
#include "kernels/launch.cuh"
#include "kernels/random.cuh"
#include "kernels/warp.cuh"
#include "ops/sample.h"

namespace bifocal {
namespace {

using Mass = unsigned long long;  // the type that atomicAdd takes

constexpr int kParts = 64;  // of a row
constexpr int kDrawThreads = 1024;
constexpr int kDigits = 3;
constexpr int kStages = 2 * kDigits;  // top_k's digits, then top_p's
constexpr int kBins = 1 << 11;
constexpr int kBinsOfThread = kBins / kBlockThreads;
constexpr unsigned kAllEqual = 0xffffffffU;

__host__ __device__ constexpr int digit_shift(int digit) {
  return digit == 0 ? 21 : digit == 1 ? 10 : 0;
}

__host__ __device__ constexpr int digit_bits(int digit) {
  return digit == 2 ? 10 : 11;
}

// The digits of the key found so far, and how much is still needed from there downwards.
struct Search {
  unsigned key;
  Mass need;
};

// Ids above `key` are kept, and of those at it the last `equal`.
struct Kept {
  unsigned key, equal;
};

template <class T>
struct SampleArrays {
  std::int32_t* ids;
  const T* logits;
  std::int64_t rows, vocabulary, span;  // ids of a part
  double temperature, top_p, scale;     // scale: 2^shift
  std::int64_t top_k;                   // 0: all
  std::uint64_t seed;
  const std::int64_t *streams, *indices;
  Mass* best;            // [rows, kParts] largest key, and its lowest id
  Mass* bins;            // [rows, kStages, kBins]
  Search* searches;      // [rows, kStages] before the stage
  unsigned* least;       // [rows] smallest key that top_k keeps
  Kept* kept;            // [rows]
  Mass* part_mass;       // [rows, kParts] of ids above kept.key
  unsigned* part_equal;  // [rows, kParts] ids at kept.key
};

// Ordered as the logits are; -0 is 0.
__device__ unsigned key_of(float logit) {
  const unsigned bits = __float_as_uint(logit + 0.0F);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

__device__ float logit_of(unsigned key) {
  return __uint_as_float((key & 0x80000000U) != 0 ? key & 0x7fffffffU : ~key);
}

// One row as a block sees it.
template <class T>
struct Row {
  const SampleArrays<T>& a;
  std::int64_t row;
  const T* logits;
  std::int32_t best_id;  // the lowest id of the largest logit
  double largest;

  // All threads of the block must call.
  __device__ Row(const SampleArrays<T>& arrays, std::int64_t number)
      : a(arrays), row(number), logits(arrays.logits + number * arrays.vocabulary) {
    Mass best = 0;
    for (int part = static_cast<int>(threadIdx.x) % kWarp; part < kParts; part += kWarp) {
      best = max(best, a.best[row * kParts + part]);
    }
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      best = max(best, __shfl_xor_sync(kAllLanes, best, distance));
    }
    best_id = static_cast<std::int32_t>(~static_cast<std::uint32_t>(best));
    largest = static_cast<double>(logit_of(static_cast<unsigned>(best >> 32)));
  }

  // 0 where there is no probability: NaN, or anything beside NaN or an infinity as the largest.
  __device__ Mass mass(float logit) const {
    const double e = exp((static_cast<double>(logit) - largest) / a.temperature);
    return e >= 0.0 ? static_cast<Mass>(rint(e * a.scale)) : 0;
  }
};

// Inclusive sum over the threads of a block up to this one; `total` becomes that of all.
template <int Threads, class Number>
__device__ Number block_scan(Number x, Number& total) {
  __shared__ Number sums[Threads / kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const Number left = __shfl_up_sync(kAllLanes, x, distance);
    x += lane >= distance ? left : 0;
  }
  __syncthreads();  // an earlier scan's sums have been read
  if (lane == kWarp - 1) {
    sums[warp] = x;
  }
  __syncthreads();
  total = 0;
  for (int w = 0; w < Threads / kWarp; ++w) {
    x += w < warp ? sums[w] : 0;
    total += sums[w];
  }
  return x;
}

// The search after `stage`, whose histogram is complete. All threads of the block must call.
template <class T>
__device__ Search after(const SampleArrays<T>& a, std::int64_t row, int stage) {
  __shared__ Search result;
  if (threadIdx.x == 0) {
    result = {0, 0};  // stays in a row without probabilities
  }
  const Mass* bins = a.bins + (row * kStages + stage) * kBins;
  const int highest = kBins - 1 - static_cast<int>(threadIdx.x) * kBinsOfThread;
  Mass own = 0;
  for (int i = 0; i < kBinsOfThread; ++i) {
    own += bins[highest - i];
  }
  Mass total = 0;
  Mass above = block_scan<kBlockThreads>(own, total) - own;
  const Search before = a.searches[row * kStages + stage];
  Mass need = before.need;
  if (stage == kDigits) {  // top_p of what top_k keeps
    need = static_cast<Mass>(ceil(a.top_p * static_cast<double>(total)));
    need = min(max(need, Mass{1}), total);
  }
  if (above < need && need <= above + own) {
    int bin = highest;
    while (need > above + bins[bin]) {
      above += bins[bin];
      --bin;
    }
    const int shift = digit_shift(stage % kDigits);
    result = {before.key | static_cast<unsigned>(bin) << shift, need - above};
  }
  __syncthreads();
  return result;
}

// ---- kernels ----

template <class T>
__global__ void __launch_bounds__(kBlockThreads) best_kernel(SampleArrays<T> a) {
  const std::int64_t row = blockIdx.y;
  const T* logits = a.logits + row * a.vocabulary;
  const std::int64_t end = min(a.vocabulary, (blockIdx.x + 1) * a.span);
  Mass best = 0;
  for (std::int64_t id = blockIdx.x * a.span + threadIdx.x; id < end; id += kBlockThreads) {
    const auto lower_first = static_cast<unsigned>(~static_cast<std::uint32_t>(id));
    best = max(best, static_cast<Mass>(key_of(load_float(logits[id]))) << 32 | lower_first);
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    best = max(best, __shfl_xor_sync(kAllLanes, best, distance));
  }
  __shared__ Mass of_warps[kBlockThreads / kWarp];
  if (threadIdx.x % kWarp == 0) {
    of_warps[threadIdx.x / kWarp] = best;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (const Mass other : of_warps) {
      best = max(best, other);
    }
    a.best[row * kParts + blockIdx.x] = best;
  }
}

// A thread for each row.
template <class T>
__global__ void greedy_kernel(SampleArrays<T> a) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= a.rows) {
    return;
  }
  Mass best = 0;
  for (int part = 0; part < kParts; ++part) {
    best = max(best, a.best[row * kParts + part]);
  }
  a.ids[row] = static_cast<std::int32_t>(~static_cast<std::uint32_t>(best));
}

// The histogram of a stage: ids, or their mass, by one digit of their keys.
template <class T>
__global__ void __launch_bounds__(kBlockThreads) histogram_kernel(SampleArrays<T> a, int stage) {
  __shared__ unsigned low[kBins];
  __shared__ unsigned high[kBins];
  const Row<T> row(a, blockIdx.y);
  const int digit = stage % kDigits;
  const bool by_mass = stage >= kDigits;
  Search search{0, static_cast<Mass>(a.top_k)};
  unsigned least = 0;
  if (digit > 0) {
    search = after(a, row.row, stage - 1);
    least = by_mass ? a.least[row.row] : 0;
  } else if (by_mass && a.top_k > 0) {
    least = after(a, row.row, kDigits - 1).key;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    a.searches[row.row * kStages + stage] = search;
    a.least[row.row] = least;
  }
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kBlockThreads) {
    low[bin] = 0;
    high[bin] = 0;
  }
  __syncthreads();
  const int shift = digit_shift(digit);
  const int known = shift + digit_bits(digit);  // bits from here on are known; 32 of none
  const unsigned mask = (1U << digit_bits(digit)) - 1;
  const std::int64_t end = min(a.vocabulary, (blockIdx.x + 1) * a.span);
  for (std::int64_t id = blockIdx.x * a.span + threadIdx.x; id < end; id += kBlockThreads) {
    const float logit = load_float(row.logits[id]);
    const unsigned key = key_of(logit);
    if (key < least || static_cast<Mass>(key ^ search.key) >> known != 0) {
      continue;
    }
    // Two sums of 32 bits with the carry between them: faster than one of 64.
    const Mass mass = by_mass ? row.mass(logit) : 1;
    const unsigned bin = key >> shift & mask;
    const auto part = static_cast<unsigned>(mass);
    const unsigned before = atomicAdd(&low[bin], part);
    const unsigned rest = static_cast<unsigned>(mass >> 32) + (before + part < before ? 1 : 0);
    if (rest != 0) {
      atomicAdd(&high[bin], rest);
    }
  }
  __syncthreads();
  Mass* bins = a.bins + (row.row * kStages + stage) * kBins;
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kBlockThreads) {
    const Mass mass = static_cast<Mass>(high[bin]) << 32 | low[bin];
    if (mass != 0) {
      atomicAdd(&bins[bin], mass);
    }
  }
}

// What is kept, and its mass by parts.
template <class T>
__global__ void __launch_bounds__(kBlockThreads) parts_kernel(SampleArrays<T> a) {
  const Row<T> row(a, blockIdx.y);
  Kept kept{0, kAllEqual};
  if (a.top_p < 1.0) {
    const Search search = after(a, row.row, kStages - 1);
    const Mass each = row.mass(logit_of(search.key));
    kept = {search.key,
            each > 0 ? static_cast<unsigned>((search.need + each - 1) / each) : kAllEqual};
  } else if (a.top_k > 0) {
    kept.key = after(a, row.row, kDigits - 1).key;
  }
  Mass mass = 0;
  unsigned equal = 0;
  const std::int64_t end = min(a.vocabulary, (blockIdx.x + 1) * a.span);
  for (std::int64_t id = blockIdx.x * a.span + threadIdx.x; id < end; id += kBlockThreads) {
    const float logit = load_float(row.logits[id]);
    const unsigned key = key_of(logit);
    mass += key > kept.key ? row.mass(logit) : 0;
    equal += key == kept.key ? 1 : 0;
  }
  Mass total = 0;
  unsigned total_equal = 0;
  block_scan<kBlockThreads>(mass, total);
  block_scan<kBlockThreads>(equal, total_equal);
  if (threadIdx.x == 0) {
    a.part_mass[row.row * kParts + blockIdx.x] = total;
    a.part_equal[row.row * kParts + blockIdx.x] = total_equal;
    if (blockIdx.x == 0) {
      a.kept[row.row] = kept;
    }
  }
}

// Where a draw lies: at mass `target` of part `part`, whose first `dropped` ids at the key are not
// kept.
struct Place {
  int part;
  unsigned dropped;
  Mass target;
};

template <class T>
__device__ Place place_of(const Row<T>& row, const Kept& kept) {
  const SampleArrays<T>& a = row.a;
  const Mass* mass = a.part_mass + row.row * kParts;
  const unsigned* equal = a.part_equal + row.row * kParts;
  const Mass each = row.mass(logit_of(kept.key));
  Mass total = 0;
  unsigned left = kept.equal;
  for (int part = kParts - 1; part >= 0; --part) {
    const unsigned taken = min(left, equal[part]);
    total += mass[part] + each * taken;
    left -= taken;
  }
  const DeviceRandom random(a.seed, static_cast<std::uint64_t>(a.streams[row.row]));
  const double u = random.uniform(static_cast<std::uint64_t>(a.indices[row.row]));
  // The id at the target counts down from the end, as the ids at the key do.
  Mass after_target = total - min(static_cast<Mass>(u * static_cast<double>(total)), total - 1);
  left = kept.equal;
  for (int part = kParts - 1; part > 0; --part) {
    const unsigned taken = min(left, equal[part]);
    const Mass of_part = mass[part] + each * taken;
    if (after_target <= of_part) {
      return {part, equal[part] - taken, of_part - after_target};
    }
    after_target -= of_part;
    left -= taken;
  }
  const unsigned taken = min(left, equal[0]);
  return {0, equal[0] - taken, mass[0] + each * taken - after_target};
}

template <class T>
__global__ void __launch_bounds__(kDrawThreads) draw_kernel(SampleArrays<T> a) {
  __shared__ Place place;
  const Row<T> row(a, blockIdx.x);
  const Kept kept = a.kept[row.row];
  if (threadIdx.x == 0) {
    place = place_of(row, kept);
    a.ids[row.row] = row.best_id;  // stays in a row without probabilities
  }
  __syncthreads();
  const std::int64_t begin = place.part * a.span;
  const std::int64_t end = min(a.vocabulary, begin + a.span);
  Mass before = 0;
  unsigned equal_before = 0;
  for (std::int64_t first = begin; first < end; first += kDrawThreads) {
    const std::int64_t id = first + threadIdx.x;
    const float logit = id < end ? load_float(row.logits[id]) : 0.0F;
    const unsigned key = id < end ? key_of(logit) : 0;
    const unsigned equal = id < end && key == kept.key ? 1 : 0;
    unsigned equal_total = 0;
    const unsigned rank = equal_before + block_scan<kDrawThreads>(equal, equal_total) - equal;
    const bool is_kept = id < end && (key > kept.key || (equal != 0 && rank >= place.dropped));
    const Mass mass = is_kept ? row.mass(logit) : 0;
    Mass total = 0;
    const Mass to = before + block_scan<kDrawThreads>(mass, total);
    if (to - mass <= place.target && place.target < to) {
      a.ids[row.row] = static_cast<std::int32_t>(id);
    }
    before += total;
    equal_before += equal_total;
  }
}

template <class T>
void sample(CudaStream& stream, const Sample& op) {
  SampleArrays<T> a{};
  a.ids = op.ids.as<std::int32_t>();
  a.logits = op.logits.as<T>();
  a.rows = op.logits.shape[0];
  a.vocabulary = op.logits.shape[1];
  a.span = ceil_div(a.vocabulary, kParts);
  DeviceScratch scratch(stream);
  a.best = scratch.take<Mass>(a.rows * kParts);
  const dim3 parts(kParts, static_cast<unsigned>(a.rows));
  best_kernel<T><<<parts, kBlockThreads, 0, stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
  if (op.temperature == 0.0) {
    greedy_kernel<T>
        <<<grid_of(ceil_div(a.rows, kBlockThreads)), kBlockThreads, 0, stream.handle()>>>(a);
    BIFOCAL_CUDA(cudaGetLastError());
    return;
  }
  constexpr int kMassBits = 62;
  a.scale = static_cast<double>(
      std::uint64_t{1} << (kMassBits - std::bit_width(static_cast<std::uint64_t>(a.vocabulary))));
  a.temperature = op.temperature;
  a.top_p = op.top_p;
  a.top_k = op.top_k < a.vocabulary ? op.top_k : 0;
  a.seed = op.seed;
  a.streams = op.streams.as<std::int64_t>();
  a.indices = op.indices.as<std::int64_t>();
  a.bins = scratch.take<Mass>(a.rows * kStages * kBins);
  a.searches = scratch.take<Search>(a.rows * kStages);
  a.least = scratch.take<unsigned>(a.rows);
  a.kept = scratch.take<Kept>(a.rows);
  a.part_mass = scratch.take<Mass>(a.rows * kParts);
  a.part_equal = scratch.take<unsigned>(a.rows * kParts);
  const auto bytes = static_cast<std::size_t>(a.rows * kStages * kBins) * sizeof(Mass);
  BIFOCAL_CUDA(cudaMemsetAsync(a.bins, 0, bytes, stream.handle()));
  for (int stage = 0; stage < kStages; ++stage) {
    if (stage < kDigits ? a.top_k > 0 : a.top_p < 1.0) {
      histogram_kernel<T><<<parts, kBlockThreads, 0, stream.handle()>>>(a, stage);
      BIFOCAL_CUDA(cudaGetLastError());
    }
  }
  parts_kernel<T><<<parts, kBlockThreads, 0, stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
  draw_kernel<T><<<grid_of(a.rows), kDrawThreads, 0, stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
}

}  // namespace

void run(CudaStream& stream, const Sample& op) {
  constexpr std::int64_t kMostRows = 65535;  // of grid.y
  if (op.logits.size() == 0) {
    return;
  }
  BIFOCAL_REQUIRE(op.logits.shape[0] <= kMostRows,
                  "[sample] wanted at most {} rows on a GPU, got {}: draw them in parts",
                  kMostRows,
                  op.logits.shape[0]);
  dispatch_device(
      "sample", op.logits.dtype, [&](auto zero) { sample<decltype(zero)>(stream, op); });
}

}  // namespace bifocal
