// Rotation by position, in place: one read and one write of x.
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

}  // namespace

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
