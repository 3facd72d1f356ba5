// Token embedding: rows copied by id; gradients summed by id in the order of tokens, without
// atomics: tokens are sorted by id, then runs of equal ids added up.
#include <algorithm>
#include <bit>
#include <cub/device/device_radix_sort.cuh>
#include <limits>

#include "kernels/cuda_stream.h"
#include "kernels/device_scratch.h"
#include "kernels/launch.cuh"
#include "ops/embedding.h"

namespace bifocal {
namespace {

constexpr const char* kWhere = "embedding";
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// `lanes` threads of a block copy the row of one token.
template <class T, int N>
__global__ void __launch_bounds__(kBlockThreads) embedding_forward_kernel(T* y,
                                                                          const std::int32_t* ids,
                                                                          const T* table,
                                                                          std::int64_t tokens,
                                                                          std::int64_t vocabulary,
                                                                          std::int64_t width,
                                                                          int lanes) {
  const int place = static_cast<int>(threadIdx.x) / lanes;
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * (kBlockThreads / lanes) + place;
  if (t >= tokens) {
    return;
  }
  const std::int64_t id = ids[t];
  const bool known = id >= 0 && id < vocabulary;
  const T* from = table + (known ? id : 0) * width;
  T* to = y + t * width;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  for (std::int64_t group = lane; group < width / N; group += lanes) {
    Vector<T, N> row;
    if (known) {
      row = load_vector<N>(from, group);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        row.element[i] = store_as<T>(kNan);
      }
    }
    store_vector<N>(to, group, row);
  }
}

// Ids that the table lacks sort behind all others.
__global__ void __launch_bounds__(kBlockThreads) make_keys_kernel(std::uint32_t* keys,
                                                                  std::int32_t* places,
                                                                  const std::int32_t* ids,
                                                                  int tokens,
                                                                  std::uint32_t vocabulary) {
  const int t = static_cast<int>(blockIdx.x) * kBlockThreads + static_cast<int>(threadIdx.x);
  if (t < tokens) {
    keys[t] = min(static_cast<std::uint32_t>(ids[t]), vocabulary);
    places[t] = t;
  }
}

// Sorted tokens are cut into spans. A run of one id inside a span is added to the table at once. Of
// a run that spans cut, each span leaves its part's sum, by columns: `first` where the run came in
// from the span before, `last` where it begins here and goes on.
constexpr int kSpan = 32;
constexpr int kColumnGroups = 64;  // of columns, one thread each, in a block

struct Runs {
  const std::uint32_t* keys;   // sorted
  const std::int32_t* places;  // tokens, by key and then by token
  float* first;                // [spans, width]
  float* last;                 // [spans, width]
  int tokens;
  std::uint32_t vocabulary;
  std::int64_t width;

  __device__ bool joined(int place) const {  // with the place before
    return place > 0 && place < tokens && keys[place] == keys[place - 1];
  }
};

template <int N>
__device__ void add_to(float* table, std::int64_t group, const Vector<float, N>& sum) {
  Vector<float, N> row = load_vector<N>(table, group);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    row.element[i] += sum.element[i];
  }
  store_vector<N>(table, group, row);
}

template <class T, int N>
__global__ void __launch_bounds__(kColumnGroups)
    sum_runs_kernel(float* d_table, const T* d_y, const Runs runs) {
  const std::int64_t group = static_cast<std::int64_t>(blockIdx.y) * kColumnGroups + threadIdx.x;
  if (group >= runs.width / N) {
    return;
  }
  const int span = static_cast<int>(blockIdx.x);
  const int begin = span * kSpan;
  const int end = min(begin + kSpan, runs.tokens);
  constexpr int kAhead = 4;  // rows in flight
  Vector<float, N> sum{};
  bool from_before = runs.joined(begin);
  for (int base = begin; base < end; base += kAhead) {
    Vector<T, N> rows[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const std::int64_t token = runs.places[min(base + i, end - 1)];
      rows[i] = load_vector<N>(d_y + token * runs.width, group);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int place = base + i;
      if (place >= end) {
        break;
      }
#pragma unroll
      for (int j = 0; j < N; ++j) {
        sum.element[j] += load_float(rows[i].element[j]);
      }
      const bool goes_on = runs.joined(place + 1);
      if (goes_on && place + 1 < end) {
        continue;
      }
      const std::uint32_t id = runs.keys[place];
      if (from_before) {
        store_vector<N>(runs.first + span * runs.width, group, sum);
      } else if (goes_on) {
        store_vector<N>(runs.last + span * runs.width, group, sum);
      } else if (id < runs.vocabulary) {
        add_to<N>(d_table + id * runs.width, group, sum);
      }
      from_before = false;
      sum = {};
    }
  }
}

// The spans where a run begins that later ones continue add its parts in order.
template <int N>
__global__ void __launch_bounds__(kColumnGroups) join_runs_kernel(float* d_table, const Runs runs) {
  const std::int64_t group = static_cast<std::int64_t>(blockIdx.y) * kColumnGroups + threadIdx.x;
  const int span = static_cast<int>(blockIdx.x);
  int next = (span + 1) * kSpan;  // the first place of the span after
  if (group >= runs.width / N || !runs.joined(next)) {
    return;
  }
  const std::uint32_t id = runs.keys[next];
  const bool begins_here = span == 0 || runs.keys[span * kSpan - 1] != id;
  if (!begins_here || id >= runs.vocabulary) {
    return;
  }
  Vector<float, N> sum = load_vector<N>(runs.last + span * runs.width, group);
  for (int other = span + 1; runs.joined(next); ++other) {
    const auto part = load_vector<N>(runs.first + other * runs.width, group);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sum.element[i] += part.element[i];
    }
    next += kSpan;
    if (next < runs.tokens && runs.keys[next - 1] != id) {
      break;  // it ended inside that span
    }
  }
  add_to<N>(d_table + id * runs.width, group, sum);
}

template <class T, int N>
void launch_forward(CudaStream& stream, const EmbeddingForward& op) {
  const std::int64_t tokens = op.ids.shape[0];
  const std::int64_t width = op.table.shape[1];
  const int lanes = width / N > 32 ? 64 : 32;
  const dim3 grid = grid_of(ceil_div(tokens, kBlockThreads / lanes));
  embedding_forward_kernel<T, N>
      <<<grid, kBlockThreads, 0, stream.handle()>>>(op.y.as<T>(),
                                                    op.ids.as<std::int32_t>(),
                                                    op.table.as<T>(),
                                                    tokens,
                                                    op.table.shape[0],
                                                    width,
                                                    lanes);
  BIFOCAL_CUDA(cudaGetLastError());
}

// Tokens by id, equal ids by token.
void sort_by_id(CudaStream& stream,
                const EmbeddingBackward& op,
                DeviceScratch& scratch,
                Runs& runs) {
  auto* keys = scratch.take<std::uint32_t>(runs.tokens);
  auto* places = scratch.take<std::int32_t>(runs.tokens);
  auto* sorted_keys = scratch.take<std::uint32_t>(runs.tokens);
  auto* sorted_places = scratch.take<std::int32_t>(runs.tokens);
  make_keys_kernel<<<grid_of(ceil_div(runs.tokens, kBlockThreads)),
                     kBlockThreads,
                     0,
                     stream.handle()>>>(
      keys, places, op.ids.as<std::int32_t>(), runs.tokens, runs.vocabulary);
  BIFOCAL_CUDA(cudaGetLastError());
  const int bits = static_cast<int>(std::bit_width(runs.vocabulary));
  const auto sort = [&](void* temporary, std::size_t& bytes) {
    BIFOCAL_CUDA(cub::DeviceRadixSort::SortPairs(temporary,
                                                 bytes,
                                                 keys,
                                                 sorted_keys,
                                                 places,
                                                 sorted_places,
                                                 runs.tokens,
                                                 0,
                                                 bits,
                                                 stream.handle()));
  };
  std::size_t bytes = 0;
  sort(nullptr, bytes);
  sort(scratch.take<std::byte>(static_cast<std::int64_t>(bytes)), bytes);
  runs.keys = sorted_keys;
  runs.places = sorted_places;
}

template <class T, int N>
void launch_backward(CudaStream& stream, const EmbeddingBackward& op, const Runs& runs) {
  dim3 grid = grid_of(ceil_div(runs.tokens, kSpan));
  grid.y = grid_of(ceil_div(runs.width / N, kColumnGroups)).x;
  auto* d_table = op.d_table.as<float>();
  sum_runs_kernel<T, N><<<grid, kColumnGroups, 0, stream.handle()>>>(d_table, op.d_y.as<T>(), runs);
  BIFOCAL_CUDA(cudaGetLastError());
  join_runs_kernel<N><<<grid, kColumnGroups, 0, stream.handle()>>>(d_table, runs);
  BIFOCAL_CUDA(cudaGetLastError());
}

}  // namespace

void run(CudaStream& stream, const EmbeddingForward& op) {
  require_type(kWhere, "table", op.table, op.y.dtype);
  dispatch_device(kWhere, op.y.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kGroup = kVectorSize<T>;
    if (op.y.size() == 0) {
      return;
    }
    if (op.table.shape[1] % kGroup == 0 && is_aligned(16, op.y.data, op.table.data)) {
      launch_forward<T, kGroup>(stream, op);
    } else {
      launch_forward<T, 1>(stream, op);
    }
  });
}

void run(CudaStream& stream, const EmbeddingBackward& op) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() - kSpan;
  const std::int64_t tokens = op.ids.shape[0];
  BIFOCAL_REQUIRE(tokens <= kMost && op.d_table.shape[0] <= kMost,
                  "[{}] wanted at most {} tokens and ids, got {} and {}: cut the row",
                  kWhere,
                  kMost,
                  tokens,
                  op.d_table.shape[0]);
  require_type(kWhere, "d_table", op.d_table, DType::f32);
  if (op.d_y.size() == 0 || op.d_table.size() == 0) {
    return;
  }
  DeviceScratch scratch(stream);
  Runs runs{};
  runs.tokens = static_cast<int>(tokens);
  runs.vocabulary = static_cast<std::uint32_t>(op.d_table.shape[0]);
  runs.width = op.d_table.shape[1];
  sort_by_id(stream, op, scratch, runs);
  const std::int64_t spans = ceil_div(tokens, kSpan);
  runs.first = scratch.take<float>(spans * runs.width);
  runs.last = scratch.take<float>(spans * runs.width);
  dispatch_device(kWhere, op.d_y.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kGroup = kVectorSize<T>;
    const bool aligned =
        is_aligned(16, op.d_y.data) && is_aligned(kGroup * sizeof(float), op.d_table.data);
    if (aligned && runs.width % kGroup == 0) {
      launch_backward<T, kGroup>(stream, op, runs);
    } else {
      launch_backward<T, 1>(stream, op, runs);
    }
  });
}

}  // namespace bifocal
