// RMSNorm forward, alone and of a sum: a row is read once and kept in registers between its sum and
// its output.
#include <algorithm>

#include "kernels/launch.cuh"
#include "kernels/norm_rows.cuh"
#include "ops/elementwise.h"
#include "ops/fused_norm.h"
#include "ops/rms_norm.h"

namespace bifocal {
namespace {

constexpr int kKeptElements = 32;  // of a wide row in the registers of one thread

// The sum over the Threads threads of a row, given to each of them, in a fixed order.
template <int Threads>
__device__ float row_sum(float x) {
  x = warp_sum(x);
  if constexpr (Threads > kWarp) {
    __shared__ float partial[Threads / kWarp];
    if (threadIdx.x % kWarp == 0) {
      partial[threadIdx.x / kWarp] = x;
    }
    __syncthreads();
    x = 0.0F;
#pragma unroll
    for (int warp = 0; warp < Threads / kWarp; ++warp) {
      x += partial[warp];
    }
  }
  return x;
}

template <class T, int N>
__device__ float sum_squares(const Vector<T, N>& v) {
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float x = load_float(v.element[i]);
    sum += x * x;
  }
  return sum;
}

template <class T, int N>
__device__ void write_normed(
    T* y, const T* weight, std::int64_t group, Vector<T, N> v, float inverse_rms) {
  const auto w = load_vector<N>(weight, group);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    v.element[i] = store_as<T>(load_float(v.element[i]) * inverse_rms * load_float(w.element[i]));
  }
  store_vector<N>(y, group, v);
}

// A row belongs to Threads threads: a warp for narrow rows (eight rows to a block), a block for
// wide ones. What of a row exceeds the registers is read a second time. y may be x: a thread
// writes only the groups that it read itself.
template <class T, int N, int Threads>
__global__ void __launch_bounds__(kBlockThreads) rms_norm_forward_kernel(
    T* y, const T* x, const T* weight, std::int64_t rows, std::int64_t width, float eps) {
  constexpr int kRowsPerBlock = kBlockThreads / Threads;
  constexpr int kKept = kKeptElements / N;
  const std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / Threads;
  if (row >= rows) {
    return;  // whole warps leave together, and a block of one row never does
  }
  const auto lane = static_cast<std::int64_t>(threadIdx.x % Threads);
  const std::int64_t groups = width / N;
  const T* from = x + row * width;
  T* to = y + row * width;

  Vector<T, N> kept[kKept];
  float sum = 0.0F;
#pragma unroll
  for (int k = 0; k < kKept; ++k) {
    const std::int64_t group = lane + k * Threads;
    if (group < groups) {
      kept[k] = load_vector<N>(from, group);
      sum += sum_squares<T, N>(kept[k]);
    }
  }
  for (std::int64_t group = lane + kKept * Threads; group < groups; group += Threads) {
    sum += sum_squares<T, N>(load_vector<N>(from, group));
  }
  const float mean = row_sum<Threads>(sum) / static_cast<float>(width);
  const float inverse_rms = 1.0F / sqrtf(mean + eps);

#pragma unroll
  for (int k = 0; k < kKept; ++k) {
    const std::int64_t group = lane + k * Threads;
    if (group < groups) {
      write_normed<T, N>(to, weight, group, kept[k], inverse_rms);
    }
  }
  for (std::int64_t group = lane + kKept * Threads; group < groups; group += Threads) {
    write_normed<T, N>(to, weight, group, load_vector<N>(from, group), inverse_rms);
  }
}

// ---- rows of up to 16 groups a lane, on multiples of 16 bytes ----

template <class T>
struct NormArrays {
  T* z;            // normed
  T* y;            // the sum, where there is one
  const T *a, *b;  // what is normed, and what is added first
  const T* weight;
  std::int64_t rows;
  int groups;  // of a row
  float eps;
};

// Lanes of a warp share R rows: all of their groups are asked for before any is used. z or y may be
// a or b.
template <class T, int Lanes, int V, int R, bool Add>
__global__ void __launch_bounds__(kBlockThreads) norm_rows_kernel(NormArrays<T> a) {
  constexpr int kTeams = kBlockThreads / Lanes;
  const int lane = static_cast<int>(threadIdx.x) % Lanes;
  const int team = static_cast<int>(threadIdx.x) / Lanes;
  const std::int64_t first = (static_cast<std::int64_t>(blockIdx.x) * kTeams + team) * R;
  Packed<T> x[R][V];
  Packed<T> other[Add ? R : 1][Add ? V : 1];
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int group = lane + k * Lanes;
      const bool valid = first + r < a.rows && group < a.groups;
      x[r][k] = {};
      if (valid) {
        x[r][k] = load_packed(a.a, (first + r) * a.groups + group);
      }
      if constexpr (Add) {
        other[r][k] = {};
        if (valid) {
          other[r][k] = load_packed(a.b, (first + r) * a.groups + group);
        }
      }
    }
  }
  float inverse[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if constexpr (Add) {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        float sum[kVectorSize<T>];
#pragma unroll
        for (int i = 0; i < kVectorSize<T>; ++i) {
          sum[i] = x[r][k][i] + other[r][k][i];
        }
        x[r][k] = Packed<T>::of(sum);
      }
    }
    inverse[r] = inverse_rms<Lanes, V>(x[r], static_cast<float>(a.groups * kVectorSize<T>), a.eps);
  }
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const int group = lane + k * Lanes;
    if (group >= a.groups) {
      continue;
    }
    const Packed<T> weight = load_packed(a.weight, group);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (first + r < a.rows) {
        const std::int64_t at = (first + r) * a.groups + group;
        if constexpr (Add) {
          store_packed(a.y, at, x[r][k]);
        }
        store_packed(a.z, at, normed(x[r][k], inverse[r], weight));
      }
    }
  }
}

template <class T, bool Add, int Lanes, int V, int R>
void launch_rows(CudaStream& stream, const NormArrays<T>& a) {
  constexpr int kRows = kBlockThreads / Lanes * R;  // of a block
  norm_rows_kernel<T, Lanes, V, R, Add>
      <<<grid_of(ceil_div(a.rows, kRows)), kBlockThreads, 0, stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
}

constexpr int kMostGroups = 16 * kWarp;  // of a row in registers

// False where the row is too wide.
template <class T, bool Add>
bool launch_in_registers(CudaStream& stream, const NormArrays<T>& a) {
  if (a.groups <= 8) {
    launch_rows<T, Add, 8, 1, 4>(stream, a);
  } else if (a.groups <= 16) {
    launch_rows<T, Add, 16, 1, 4>(stream, a);
  } else if (a.groups <= 32) {
    launch_rows<T, Add, 32, 1, 4>(stream, a);
  } else if (a.groups <= 64) {
    launch_rows<T, Add, 32, 2, Add ? 1 : 2>(stream, a);  // 2 rows of both terms spill
  } else if (a.groups <= 4 * kWarp) {
    launch_rows<T, Add, 32, 4, 1>(stream, a);
  } else if (a.groups <= 8 * kWarp) {
    launch_rows<T, Add, 32, 8, 1>(stream, a);
  } else if (a.groups <= 10 * kWarp) {
    launch_rows<T, Add, 32, 10, 1>(stream, a);
  } else if (a.groups <= kMostGroups) {
    launch_rows<T, Add, 32, 16, 1>(stream, a);
  } else {
    return false;
  }
  return true;
}

// Rows of any width and alignment, N elements in an access; with N > 1 wide ones alone.
template <class T, int N>
void launch_any(CudaStream& stream, const RmsNormForward& op) {
  const std::int64_t rows = op.x.shape[0];
  const std::int64_t width = op.x.shape[1];
  T* y = op.y.as<T>();
  const T* x = op.x.as<T>();
  const T* weight = op.weight.as<T>();
  const auto eps = static_cast<float>(op.eps);
  if (N == 1 && width <= kWarp * kKeptElements) {
    const dim3 grid = grid_of(ceil_div(rows, kBlockThreads / kWarp));
    rms_norm_forward_kernel<T, 1, kWarp>
        <<<grid, kBlockThreads, 0, stream.handle()>>>(y, x, weight, rows, width, eps);
  } else {
    rms_norm_forward_kernel<T, N, kBlockThreads>
        <<<grid_of(rows), kBlockThreads, 0, stream.handle()>>>(y, x, weight, rows, width, eps);
  }
  BIFOCAL_CUDA(cudaGetLastError());
}

// Whether rows of this width on these pointers can go through registers.
template <class T, class... Pointers>
bool has_groups(std::int64_t width, const Pointers*... pointers) {
  return width % kVectorSize<T> == 0 && is_aligned(16, pointers...);
}

}  // namespace

void run(CudaStream& stream, const RmsNormForward& op) {
  require_type("rms_norm", "x", op.x, op.y.dtype);
  require_type("rms_norm", "weight", op.weight, op.y.dtype);
  if (op.x.size() == 0) {
    return;
  }
  dispatch_device("rms_norm", op.y.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kGroup = kVectorSize<T>;
    const std::int64_t width = op.x.shape[1];
    NormArrays<T> a{};
    a.z = op.y.as<T>();
    a.a = op.x.as<T>();
    a.weight = op.weight.as<T>();
    a.rows = op.x.shape[0];
    a.eps = static_cast<float>(op.eps);
    if (!has_groups<T>(width, a.z, a.a, a.weight)) {
      launch_any<T, 1>(stream, op);
      return;
    }
    a.groups = static_cast<int>(std::min<std::int64_t>(width / kGroup, kMostGroups + 1));
    if (!launch_in_registers<T, false>(stream, a)) {
      launch_any<T, kGroup>(stream, op);
    }
  });
}

void run(CudaStream& stream, const AddRmsNorm& op) {
  if (op.a.size() == 0) {
    return;
  }
  dispatch_device("rms_norm", op.y.dtype, [&](auto zero) {
    using T = decltype(zero);
    const std::int64_t width = op.a.shape[1];
    NormArrays<T> a{};
    a.z = op.z.as<T>();
    a.y = op.y.as<T>();
    a.a = op.a.as<T>();
    a.b = op.b.as<T>();
    a.weight = op.weight.as<T>();
    a.rows = op.a.shape[0];
    a.eps = static_cast<float>(op.eps);
    a.groups = static_cast<int>(std::min<std::int64_t>(width / kVectorSize<T>, kMostGroups + 1));
    if (has_groups<T>(width, a.z, a.y, a.a, a.b, a.weight) &&
        launch_in_registers<T, true>(stream, a)) {
      return;
    }
    run(stream, Add{op.y, op.a, op.b});
    run(stream, RmsNormForward{op.z, op.y, op.weight, op.eps});
  });
}

}  // namespace bifocal
