// Tables of angles, and rotation by position, in place: one read and one write of x.
#include <algorithm>

#include "kernels/launch.cuh"
#include "ops/rope.h"

namespace bifocal {
namespace {

// A block takes one token. A thread takes N neighbouring elements of a head's first half and
// their partners in its second half, then the same of later heads; cos and sin are read from
// memory for the first head and from the cache for the others.
template <class T, int N>
__global__ void __launch_bounds__(kBlockThreads) rope_rotate_kernel(
    T* x, const float* cos, const float* sin, int heads, int half, float direction) {
  const std::int64_t token = blockIdx.x;
  const int groups = half / N;
  T* row = x + token * heads * 2 * half;
  const float* row_cos = cos + token * half;
  const float* row_sin = sin + token * half;
  for (int item = static_cast<int>(threadIdx.x); item < heads * groups; item += kBlockThreads) {
    const int head = item / groups;
    const int group = item - head * groups;
    T* low = row + static_cast<std::int64_t>(head) * 2 * half;
    T* high = low + half;
    auto a = load_vector<N>(low, group);
    auto b = load_vector<N>(high, group);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float c = row_cos[group * N + i];
      const float s = row_sin[group * N + i] * direction;
      const float from_low = load_float(a.element[i]);
      const float from_high = load_float(b.element[i]);
      a.element[i] = store_as<T>(from_low * c - from_high * s);
      b.element[i] = store_as<T>(from_high * c + from_low * s);
    }
    store_vector<N>(low, group, a);
    store_vector<N>(high, group, b);
  }
}

constexpr int kFrequencies = 128;  // that one launch takes along as parameters

struct Frequencies {
  double of[kFrequencies];
};

// Columns [first, first + count) of the table. The angle is the CPU's; it is brought to [-pi, pi]
// by whole turns with 2 pi in two parts, which leaves an error of about 1e-16, and needs none of
// the local memory of the library's reduction of any angle.
__global__ void __launch_bounds__(kBlockThreads) rope_table_kernel(float* cos,
                                                                   float* sin,
                                                                   const std::int32_t* positions,
                                                                   std::int64_t tokens,
                                                                   std::int64_t half,
                                                                   std::int64_t first,
                                                                   int count,
                                                                   Frequencies frequencies) {
  constexpr double kTurn = 6.283185307179586;           // 2 pi,
  constexpr double kTurnRest = 2.4492935982947064e-16;  // and what it lacks
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  const std::int64_t token = item / count;
  const auto column = static_cast<int>(item - token * count);
  if (token >= tokens) {
    return;
  }
  const double angle = static_cast<double>(positions[token]) * frequencies.of[column];
  const double turns = rint(angle * (1.0 / kTurn));
  const double rest = fma(-turns, kTurnRest, fma(-turns, kTurn, angle));
  double s = 0.0;
  double c = 0.0;
  sincospi(rest * (2.0 / kTurn), &s, &c);
  const std::int64_t at = token * half + first + column;
  cos[at] = static_cast<float>(c);
  sin[at] = static_cast<float>(s);
}

}  // namespace

// The frequencies lie on the host and are read before this returns.
void run(CudaStream& stream, const RopeTable& op) {
  require_type("rope", "cos", op.cos, DType::f32);
  require_type("rope", "sin", op.sin, DType::f32);
  const std::int64_t tokens = op.positions.size();
  const std::int64_t half = op.frequencies.size();
  if (tokens == 0) {
    return;
  }
  const auto* all = op.frequencies.as<double>();
  for (std::int64_t first = 0; first < half; first += kFrequencies) {
    const auto count = static_cast<int>(std::min<std::int64_t>(kFrequencies, half - first));
    Frequencies frequencies{};
    std::copy_n(all + first, count, frequencies.of);
    rope_table_kernel<<<grid_of(ceil_div(tokens * count, kBlockThreads)),
                        kBlockThreads,
                        0,
                        stream.handle()>>>(op.cos.as<float>(),
                                           op.sin.as<float>(),
                                           op.positions.as<std::int32_t>(),
                                           tokens,
                                           half,
                                           first,
                                           count,
                                           frequencies);
    BIFOCAL_CUDA(cudaGetLastError());
  }
}

void run(CudaStream& stream, const RopeRotate& op) {
  require_type("rope", "cos", op.cos, DType::f32);
  require_type("rope", "sin", op.sin, DType::f32);
  if (op.x.size() == 0) {
    return;
  }
  dispatch_device("rope", op.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    T* x = op.x.as<T>();
    const auto* cos = op.cos.as<float>();
    const auto* sin = op.sin.as<float>();
    const auto heads = static_cast<int>(op.x.shape[1]);
    const auto half = static_cast<int>(op.x.shape[2] / 2);
    const float direction = op.inverse ? -1.0F : 1.0F;
    const dim3 grid = grid_of(op.x.shape[0]);
    constexpr int kGroup = kVectorSize<T>;
    if (half % kGroup == 0 && is_aligned(16, x)) {
      rope_rotate_kernel<T, kGroup>
          <<<grid, kBlockThreads, 0, stream.handle()>>>(x, cos, sin, heads, half, direction);
    } else {
      rope_rotate_kernel<T, 1>
          <<<grid, kBlockThreads, 0, stream.handle()>>>(x, cos, sin, heads, half, direction);
    }
    BIFOCAL_CUDA(cudaGetLastError());
  });
}

}  // namespace bifocal
