// RMSNorm backward: one read of x and d_y, one write of d_x. With r = 1 / rms and g = weight d_y:
//   d_x = r g - x r^3 / width (x . g),   d_weight = column sums of d_y x r.
// A team of threads keeps a row in registers between its two sums and its output, and the sums of
// its columns over all its rows. The teams' column sums meet in a second kernel, in order. Teams,
// hence the order of the sums, depend on the tensor's shape alone.
#include "kernels/device_scratch.h"
#include "kernels/launch.cuh"
#include "kernels/warp.cuh"
#include "ops/rms_norm.h"

namespace bifocal {
namespace {

constexpr int kProcessors = 132;     // for which the grids are made, whatever the device
constexpr int kMostBlockTeam = 512;  // threads of a row

template <class T>
struct BackwardArrays {
  T* d_x;
  const T *d_y, *x, *weight;
  float* parts;  // [blocks, width] column sums
  std::int64_t rows, width;
  float eps;
  bool accumulate;
};

// Two sums at once: of x^2 and of x g.
struct RowSums {
  float squares, along;
};

// Lanes of a warp share a row; a block has several such teams.
template <int Lanes>
struct WarpTeam {
  static constexpr int kThreads = kBlockThreads;
  static constexpr int kTeams = kThreads / Lanes;
  static constexpr int kBlocks = 4;  // on a multiprocessor
  static constexpr int kWarpTeams = kWarp / Lanes;

  __device__ static int lanes() { return Lanes; }

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % Lanes; }

  __device__ static int team() { return static_cast<int>(threadIdx.x) / Lanes; }

  __device__ RowSums sum(RowSums s) const {
    return {warp_sum<Lanes>(s.squares), warp_sum<Lanes>(s.along)};
  }
};

// A block shares a row. Partial sums lie in two places in turn: who writes one a second time has
// passed a barrier that all readers of the first time reached.
// V: groups of a thread; more of them need more registers.
template <int V>
struct BlockTeam {
  static constexpr int kThreads = kMostBlockTeam;
  static constexpr int kTeams = 1;
  static constexpr int kBlocks = 2 / V;
  static constexpr int kWarpTeams = 1;
  int turn = 0;

  __device__ static int lanes() { return static_cast<int>(blockDim.x); }

  __device__ static int lane() { return static_cast<int>(threadIdx.x); }

  __device__ static int team() { return 0; }

  __device__ RowSums sum(RowSums s) {
    __shared__ RowSums partial[2][kMostBlockTeam / kWarp];
    const RowSums of_warp{warp_sum(s.squares), warp_sum(s.along)};
    if (threadIdx.x % kWarp == 0) {
      partial[turn][threadIdx.x / kWarp] = of_warp;
    }
    __syncthreads();
    RowSums total{};
    for (int warp = 0; warp < static_cast<int>(blockDim.x) / kWarp; ++warp) {
      total.squares += partial[turn][warp].squares;
      total.along += partial[turn][warp].along;
    }
    turn ^= 1;
    return total;
  }
};

// This thread's V groups of a row: group lane + k lanes.
template <class T, int V>
struct RowPart {
  static constexpr int N = kVectorSize<T>;
  Packed<T> x[V];
  Packed<T> d_y[V];

  // `first` names the thread's first group in the whole tensor. Zeros where there is nothing.
  __device__ void load(
      const BackwardArrays<T>& a, std::int64_t first, bool valid, int lane, int lanes, int groups) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      x[k] = {};
      d_y[k] = {};
      if (valid && lane + k * lanes < groups) {
        x[k] = load_packed(a.x, first + k * lanes);
        d_y[k] = load_packed(a.d_y, first + k * lanes);
      }
    }
  }

  // The weight comes from the cache at each use: in registers it would cost a block its neighbour.
  __device__ RowSums sums(const BackwardArrays<T>& a, int lane, int lanes, int groups) const {
    RowSums s{};
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (lane + k * lanes < groups) {
        const Packed<T> weight = load_packed(a.weight, lane + k * lanes);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          s.squares += x[k][i] * x[k][i];
          s.along += x[k][i] * (weight[i] * d_y[k][i]);
        }
      }
    }
    return s;
  }
};

// Adds the teams' column sums of a block in order and writes them to the block's part.
template <class Team, int N, int V>
__device__ void write_parts(float (&columns)[V][N], float* part, int groups) {
  if constexpr (Team::kTeams == 1) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int group = Team::lane() + k * Team::lanes();
      if (group < groups) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          part[group * N + i] = columns[k][i];
        }
      }
    }
  } else {
    const int width = groups * N;
    __shared__ float shared[Team::kThreads * V * N];
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int group = Team::lane() + k * Team::lanes();
      if (group < groups) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          shared[Team::team() * width + group * N + i] = columns[k][i];
        }
      }
    }
    __syncthreads();
    for (int column = static_cast<int>(threadIdx.x); column < width; column += Team::kThreads) {
      float sum = 0.0F;
      for (int team = 0; team < Team::kTeams; ++team) {
        sum += shared[team * width + column];
      }
      part[column] = sum;
    }
  }
}

// d_x may be d_y: a row is read by the team that writes it, before it writes.
template <class T, int V, class Team>
__global__ void __launch_bounds__(Team::kThreads, Team::kBlocks)
    rms_norm_backward_kernel(BackwardArrays<T> a) {
  constexpr int N = kVectorSize<T>;
  Team team;
  const int lane = Team::lane();
  const int lanes = Team::lanes();
  const int groups = static_cast<int>(a.width) / N;
  float columns[V][N] = {};
  // Teams of a warp stay together: they share its shuffles.
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * Team::kTeams;
  const int ahead = Team::team() % Team::kWarpTeams;
  std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * Team::kTeams + Team::team();
  std::int64_t first = row * groups + lane;
  RowPart<T, V> next;
  next.load(a, first, row < a.rows, lane, lanes, groups);
  for (; row - ahead < a.rows; row += stride, first += stride * groups) {
    const RowPart<T, V> part = next;
    next.load(a, first + stride * groups, row + stride < a.rows, lane, lanes, groups);
    const RowSums sums = team.sum(part.sums(a, lane, lanes, groups));
    const auto width = static_cast<float>(groups * N);
    const float r = 1.0F / sqrtf(sums.squares / width + a.eps);
    const float along = sums.along * r * r * r / width;
    if (row >= a.rows) {
      continue;
    }
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (lane + k * lanes >= groups) {
        continue;
      }
      const Packed<T> weight = load_packed(a.weight, lane + k * lanes);
      Packed<T> before{};
      if (a.accumulate) {
        before = load_packed(a.d_x, first + k * lanes);
      }
      float d_x[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float x = part.x[k][i];
        const float d_y = part.d_y[k][i];
        columns[k][i] += d_y * (x * r);
        d_x[i] = before[i] + (r * (weight[i] * d_y) - along * x);
      }
      store_packed(a.d_x, first + k * lanes, Packed<T>::of(d_x));
    }
  }
  if (a.parts != nullptr) {
    write_parts<Team, N, V>(columns, a.parts + blockIdx.x * a.width, groups);
  }
}

constexpr int kColumns = 32;  // of a block that adds parts
constexpr int kPartGroups = 32;

// d_weight += the parts, in order within a group and group after group.
__global__ void __launch_bounds__(kColumns* kPartGroups)
    add_parts_kernel(float* d_weight, const float* parts, int count, std::int64_t width) {
  __shared__ double sums[kPartGroups][kColumns];
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  double sum = 0.0;
  if (column < width) {
#pragma unroll 4
    for (int part = static_cast<int>(threadIdx.y); part < count; part += kPartGroups) {
      sum += static_cast<double>(parts[part * width + column]);
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < width) {
    for (int group = 1; group < kPartGroups; ++group) {
      sum += sums[group][threadIdx.x];
    }
    d_weight[column] += static_cast<float>(sum);
  }
}

void add_parts(CudaStream& stream, const RmsNormBackward& op, const float* parts, int count) {
  const std::int64_t width = op.d_weight.size();
  add_parts_kernel<<<grid_of(ceil_div(width, kColumns)),
                     dim3(kColumns, kPartGroups),
                     0,
                     stream.handle()>>>(op.d_weight.as<float>(), parts, count, width);
  BIFOCAL_CUDA(cudaGetLastError());
}

template <class T, int V, class Team>
void launch_teams(CudaStream& stream, const RmsNormBackward& op, BackwardArrays<T> a, int threads) {
  const int resident =
      Team::kTeams == 1 ? std::max(1, Team::kBlocks * kMostBlockTeam / threads) : Team::kBlocks;
  const auto blocks = static_cast<int>(std::min<std::int64_t>(
      ceil_div(a.rows, Team::kTeams), static_cast<std::int64_t>(kProcessors) * resident));
  DeviceScratch scratch(stream);
  if (op.d_weight) {
    a.parts = scratch.take<float>(blocks * a.width);
  }
  rms_norm_backward_kernel<T, V, Team><<<grid_of(blocks), threads, 0, stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
  if (op.d_weight) {
    add_parts(stream, op, a.parts, blocks);
  }
}

// ---- rows of any width and alignment, in three kernels ----

// r and r^3 / width (x . g) of a row, a block each.
template <class T>
__global__ void __launch_bounds__(kMostBlockTeam)
    row_sums_kernel(BackwardArrays<T> a, RowSums* result) {
  const std::int64_t row = blockIdx.x;
  RowSums s{};
  for (std::int64_t i = threadIdx.x; i < a.width; i += blockDim.x) {
    const float x = load_float(a.x[row * a.width + i]);
    s.squares += x * x;
    s.along += x * (load_float(a.weight[i]) * load_float(a.d_y[row * a.width + i]));
  }
  BlockTeam<1> team;
  s = team.sum(s);
  if (threadIdx.x == 0) {
    const auto width = static_cast<float>(a.width);
    const float r = 1.0F / sqrtf(s.squares / width + a.eps);
    result[row] = {r, s.along * r * r * r / width};
  }
}

// Column sums over the block's rows [blockIdx.y span, ...): threadIdx.x names the column.
template <class T>
__global__ void __launch_bounds__(kColumns* kPartGroups)
    column_sums_kernel(BackwardArrays<T> a, const RowSums* rows, std::int64_t span) {
  __shared__ float sums[kPartGroups][kColumns];
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  const std::int64_t first = blockIdx.y * span;
  const std::int64_t end = min(a.rows, first + span);
  float sum = 0.0F;
  if (column < a.width) {
    for (std::int64_t row = first + threadIdx.y; row < end; row += kPartGroups) {
      const std::int64_t i = row * a.width + column;
      sum += load_float(a.d_y[i]) * (load_float(a.x[i]) * rows[row].squares);
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < a.width) {
    for (int group = 1; group < kPartGroups; ++group) {
      sum += sums[group][threadIdx.x];
    }
    a.parts[blockIdx.y * a.width + column] = sum;
  }
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    any_input_kernel(BackwardArrays<T> a, const RowSums* rows) {
  const std::int64_t row = blockIdx.x;
  const RowSums s = rows[row];
  for (std::int64_t i = threadIdx.x; i < a.width; i += kBlockThreads) {
    const std::int64_t at = row * a.width + i;
    const float g = load_float(a.weight[i]) * load_float(a.d_y[at]);
    const float slope = s.squares * g - s.along * load_float(a.x[at]);
    a.d_x[at] = store_as<T>(a.accumulate ? load_float(a.d_x[at]) + slope : slope);
  }
}

template <class T>
void launch_any(CudaStream& stream, const RmsNormBackward& op, BackwardArrays<T> a) {
  DeviceScratch scratch(stream);
  auto* rows = scratch.take<RowSums>(a.rows);
  const auto threads =
      static_cast<int>(std::min<std::int64_t>(kMostBlockTeam, ceil_div(a.width, kWarp) * kWarp));
  row_sums_kernel<T><<<grid_of(a.rows), threads, 0, stream.handle()>>>(a, rows);
  BIFOCAL_CUDA(cudaGetLastError());
  if (op.d_weight) {
    constexpr std::int64_t kMostParts = 64;
    const std::int64_t span =
        ceil_div(std::max<std::int64_t>(a.rows, kMostParts * kPartGroups), kMostParts);
    const auto parts = static_cast<int>(ceil_div(a.rows, span));
    a.parts = scratch.take<float>(parts * a.width);
    dim3 grid = grid_of(ceil_div(a.width, kColumns));
    grid.y = static_cast<unsigned>(parts);
    column_sums_kernel<T><<<grid, dim3(kColumns, kPartGroups), 0, stream.handle()>>>(a, rows, span);
    BIFOCAL_CUDA(cudaGetLastError());
    add_parts(stream, op, a.parts, parts);
  }
  any_input_kernel<T><<<grid_of(a.rows), kBlockThreads, 0, stream.handle()>>>(a, rows);
  BIFOCAL_CUDA(cudaGetLastError());
}

// Narrow rows (of heads) belong to part of a warp, wide ones to a block.
template <class T>
void launch(CudaStream& stream, const RmsNormBackward& op, const BackwardArrays<T>& a) {
  constexpr int kGroup = kVectorSize<T>;
  const std::int64_t groups = a.width / kGroup;
  if (a.width % kGroup != 0 || groups > 2 * kMostBlockTeam ||
      !is_aligned(16, a.d_x, a.d_y, a.x, a.weight)) {
    launch_any<T>(stream, op, a);
  } else if (groups <= 8) {
    launch_teams<T, 1, WarpTeam<8>>(stream, op, a, kBlockThreads);
  } else if (groups <= 16) {
    launch_teams<T, 1, WarpTeam<16>>(stream, op, a, kBlockThreads);
  } else if (groups <= 32) {
    launch_teams<T, 1, WarpTeam<32>>(stream, op, a, kBlockThreads);
  } else if (groups <= kMostBlockTeam) {
    const auto threads = static_cast<int>(ceil_div(groups, kWarp) * kWarp);
    launch_teams<T, 1, BlockTeam<1>>(stream, op, a, threads);
  } else {
    const auto threads = static_cast<int>(ceil_div(groups, 2 * kWarp) * kWarp);
    launch_teams<T, 2, BlockTeam<2>>(stream, op, a, threads);
  }
}

}  // namespace

void run(CudaStream& stream, const RmsNormBackward& op) {
  if (op.x.size() == 0) {
    return;
  }
  if (op.d_weight) {
    require_type("rms_norm", "d_weight", op.d_weight, DType::f32);
  }
  dispatch_device("rms_norm", op.d_x.dtype, [&](auto zero) {
    using T = decltype(zero);
    BackwardArrays<T> a{};
    a.d_x = op.d_x.as<T>();
    a.d_y = op.d_y.as<T>();
    a.x = op.x.as<T>();
    a.weight = op.weight.as<T>();
    a.rows = op.x.shape[0];
    a.width = op.x.shape[1];
    a.eps = static_cast<float>(op.eps);
    a.accumulate = op.accumulate;
    launch<T>(stream, op, a);
  });
}

}  // namespace bifocal
