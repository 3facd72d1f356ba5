// The distance of stage 1: one reading for sums and gradient, sums in two stages of fixed order.
#include <algorithm>

#include "kernels/cuda_stream.h"
#include "kernels/device_scratch.h"
#include "kernels/launch.cuh"
#include "kernels/warp.cuh"
#include "ops/distill_loss.h"

namespace bifocal {
namespace {

constexpr const char* kWhere = "align_loss";
constexpr std::int64_t kMostBlocks = 1024;  // each takes every kMostBlocks-th token
constexpr int kWarps = kBlockThreads / kWarp;

struct Sums {
  double error;
  double energy;
};

// The sum over the block, in thread 0, in a fixed order.
__device__ inline Sums block_sum(Sums x) {
  __shared__ Sums shared[kWarps];
  x.error = warp_sum(x.error);
  x.energy = warp_sum(x.energy);
  if (threadIdx.x % kWarp == 0) {
    shared[threadIdx.x / kWarp] = x;
  }
  __syncthreads();
  Sums sum{};
  for (int warp = 0; warp < kWarps; ++warp) {
    sum.error += shared[warp].error;
    sum.energy += shared[warp].energy;
  }
  return sum;
}

template <class T>
struct Problem {
  T* d_student;  // may be null, or student or teacher
  const T* student;
  const T* teacher;
  const std::uint8_t* keep;
  std::int64_t tokens, width;
};

// Squares of a group are summed in float32, groups in double.
template <int N, class T>
__device__ void add_group(Sums& sums, const Problem<T>& p, std::int64_t group) {
  const auto student = load_vector<N>(p.student, group);
  const auto teacher = load_vector<N>(p.teacher, group);
  float error = 0.0F;
  float energy = 0.0F;
  Vector<T, N> slope;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float target = load_float(teacher.element[i]);
    const float difference = load_float(student.element[i]) - target;
    error += difference * difference;
    energy += target * target;
    slope.element[i] = store_as<T>(2.0F * difference);
  }
  sums.error += static_cast<double>(error);
  sums.energy += static_cast<double>(energy);
  if (p.d_student != nullptr) {
    store_vector<N>(p.d_student, group, slope);
  }
}

template <int N, class T>
__global__ void __launch_bounds__(kBlockThreads) align_loss_kernel(Sums* partial, Problem<T> p) {
  const std::int64_t groups = p.width / N;
  Sums sums{};
  for (std::int64_t t = blockIdx.x; t < p.tokens; t += gridDim.x) {
    const bool kept = p.keep[t] != 0;
    if (!kept && p.d_student == nullptr) {
      continue;
    }
#pragma unroll 2
    for (std::int64_t group = threadIdx.x; group < groups; group += kBlockThreads) {
      if (kept) {
        add_group<N>(sums, p, t * groups + group);
      } else {
        store_vector<N>(p.d_student, t * groups + group, Vector<T, N>{});
      }
    }
  }
  sums = block_sum(sums);
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = sums;
  }
}

__global__ void __launch_bounds__(kBlockThreads)
    add_partial_kernel(double* totals, const Sums* partial, int count) {
  Sums sums{};
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kBlockThreads) {
    sums.error += partial[i].error;
    sums.energy += partial[i].energy;
  }
  sums = block_sum(sums);
  if (threadIdx.x == 0) {
    totals[0] += sums.error;
    totals[1] += sums.energy;
  }
}

}  // namespace

void run(CudaStream& stream, const AlignLoss& op) {
  const std::int64_t tokens = op.student.shape[0];
  if (op.student.size() == 0) {
    return;
  }
  DeviceScratch scratch(stream);
  const std::int64_t blocks = std::min(tokens, kMostBlocks);
  auto* partial = scratch.take<Sums>(blocks);
  dispatch_device(kWhere, op.student.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kGroup = kVectorSize<T>;
    const Problem<T> p{op.d_student ? op.d_student.as<T>() : nullptr,
                       op.student.as<T>(),
                       op.teacher.as<T>(),
                       op.keep.as<std::uint8_t>(),
                       tokens,
                       op.student.row_size()};
    const bool aligned = p.width % kGroup == 0 && is_aligned(16, p.d_student, p.student, p.teacher);
    const auto kernel = aligned ? align_loss_kernel<kGroup, T> : align_loss_kernel<1, T>;
    kernel<<<grid_of(blocks), kBlockThreads, 0, stream.handle()>>>(partial, p);
  });
  BIFOCAL_CUDA(cudaGetLastError());
  add_partial_kernel<<<1, kBlockThreads, 0, stream.handle()>>>(
      op.sums.as<double>(), partial, static_cast<int>(blocks));
  BIFOCAL_CUDA(cudaGetLastError());
}

}  // namespace bifocal
