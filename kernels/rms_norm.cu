// RMSNorm forward: a row is read once and kept in registers between its sum and its output.
#include "kernels/launch.cuh"
#include "ops/rms_norm.h"

namespace bifocal {
namespace {

constexpr int kWarp = 32;
constexpr int kKeptElements = 32;  // of a row in the registers of one thread

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xffffffffU, x, offset);
  }
  return x;
}

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

template <class T, int N>
void launch(CudaStream& stream, const RmsNormForward& op) {
  const std::int64_t rows = op.x.shape[0];
  const std::int64_t width = op.x.shape[1];
  T* y = op.y.as<T>();
  const T* x = op.x.as<T>();
  const T* weight = op.weight.as<T>();
  const auto eps = static_cast<float>(op.eps);
  if (width <= kWarp * kKeptElements) {
    const dim3 grid = grid_of(ceil_div(rows, kBlockThreads / kWarp));
    rms_norm_forward_kernel<T, N, kWarp>
        <<<grid, kBlockThreads, 0, stream.handle()>>>(y, x, weight, rows, width, eps);
  } else {
    rms_norm_forward_kernel<T, N, kBlockThreads>
        <<<grid_of(rows), kBlockThreads, 0, stream.handle()>>>(y, x, weight, rows, width, eps);
  }
  BIFOCAL_CUDA(cudaGetLastError());
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
    const bool aligned = is_aligned(16, op.y.as<T>(), op.x.as<T>(), op.weight.as<T>());
    if (aligned && op.x.shape[1] % kGroup == 0) {
      launch<T, kGroup>(stream, op);
    } else {
      launch<T, 1>(stream, op);
    }
  });
}

}  // namespace bifocal
