// Tables of angles, and rotation by position, in place: one read and one write of x.
#include <algorithm>

#include "kernels/launch.cuh"
#include "kernels/rope.cuh"
#include "ops/rope.h"

namespace bifocal {
namespace {

// A thread takes N neighbouring elements of a head's first half and their partners in its second
// half; cos and sin are read from memory for a token's first head and from the cache for the
// others.
template <class T, int N>
__global__ void __launch_bounds__(kBlockThreads) rope_rotate_kernel(T* x,
                                                                    const float* cos,
                                                                    const float* sin,
                                                                    unsigned items,
                                                                    unsigned heads,
                                                                    unsigned groups,
                                                                    float direction) {
  const unsigned item = blockIdx.x * kBlockThreads + threadIdx.x;
  if (item >= items) {
    return;
  }
  const unsigned head = item / groups;  // of all tokens
  const unsigned group = item - head * groups;
  const std::int64_t low = static_cast<std::int64_t>(head) * 2 * groups + group;
  const std::int64_t angle = static_cast<std::int64_t>(head / heads) * groups + group;
  auto a = load_floats<N>(x, low);
  auto b = load_floats<N>(x, low + groups);
  const auto c = load_floats<N>(cos, angle);
  const auto s = load_floats<N>(sin, angle);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Pair pair = rotated({a.element[i], b.element[i]}, c.element[i], s.element[i] * direction);
    a.element[i] = pair.low;
    b.element[i] = pair.high;
  }
  store_floats<N>(x, low, a);
  store_floats<N>(x, low + groups, b);
}

// As many tokens in a launch as 31 bits count.
template <class T, int N>
void rotate(CudaStream& stream, const RopeRotate& op) {
  const std::int64_t tokens = op.x.shape[0];
  const std::int64_t heads = op.x.shape[1];
  const std::int64_t half = op.x.shape[2] / 2;
  const std::int64_t of_token = heads * half / N;
  const std::int64_t most = std::max<std::int64_t>(1, 0x7fffffff / of_token);
  for (std::int64_t begin = 0; begin < tokens; begin += most) {
    const std::int64_t items = std::min(most, tokens - begin) * of_token;
    rope_rotate_kernel<T, N>
        <<<grid_of(ceil_div(items, kBlockThreads)), kBlockThreads, 0, stream.handle()>>>(
            op.x.as<T>() + begin * heads * 2 * half,
            op.cos.as<float>() + begin * half,
            op.sin.as<float>() + begin * half,
            static_cast<unsigned>(items),
            static_cast<unsigned>(heads),
            static_cast<unsigned>(half / N),
            op.inverse ? -1.0F : 1.0F);
    BIFOCAL_CUDA(cudaGetLastError());
  }
}

// A thread for each angle. The angle is the CPU's; it is brought to [-pi, pi] by whole turns with
// 2 pi in two parts, which leaves an error of about 1e-16, and needs none of the local memory of
// the library's reduction of any angle.
__global__ void __launch_bounds__(kBlockThreads) rope_table_kernel(float* cos,
                                                                   float* sin,
                                                                   const std::int32_t* positions,
                                                                   const double* frequencies,
                                                                   std::int64_t size,
                                                                   std::int64_t half) {
  constexpr double kTurn = 6.283185307179586;           // 2 pi,
  constexpr double kTurnRest = 2.4492935982947064e-16;  // and what it lacks
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  if (at >= size) {
    return;
  }
  const std::int64_t token = at / half;
  const double angle = static_cast<double>(positions[token]) * frequencies[at - token * half];
  const double turns = rint(angle * (1.0 / kTurn));
  const double rest = fma(-turns, kTurnRest, fma(-turns, kTurn, angle));
  double s = 0.0;
  double c = 0.0;
  sincospi(rest * (2.0 / kTurn), &s, &c);
  cos[at] = static_cast<float>(c);
  sin[at] = static_cast<float>(s);
}

}  // namespace

void run(CudaStream& stream, const RopeTable& op) {
  require_type("rope", "cos", op.cos, DType::f32);
  require_type("rope", "sin", op.sin, DType::f32);
  const std::int64_t size = op.cos.size();
  if (size == 0) {
    return;
  }
  rope_table_kernel<<<grid_of(ceil_div(size, kBlockThreads)), kBlockThreads, 0, stream.handle()>>>(
      op.cos.as<float>(),
      op.sin.as<float>(),
      op.positions.as<std::int32_t>(),
      op.frequencies.as<double>(),
      size,
      op.frequencies.size());
  BIFOCAL_CUDA(cudaGetLastError());
}

void run(CudaStream& stream, const RopeRotate& op) {
  require_type("rope", "cos", op.cos, DType::f32);
  require_type("rope", "sin", op.sin, DType::f32);
  if (op.x.size() == 0) {
    return;
  }
  dispatch_device("rope", op.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kGroup = kVectorSize<T>;
    const std::int64_t half = op.x.shape[2] / 2;
    const bool aligned = is_aligned(16, op.x.as<T>(), op.cos.as<float>(), op.sin.as<float>());
    if (half % kGroup == 0 && aligned) {
      rotate<T, kGroup>(stream, op);
    } else {
      rotate<T, 1>(stream, op);
    }
  });
}

}  // namespace bifocal
