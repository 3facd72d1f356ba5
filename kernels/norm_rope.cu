// RMSNorm of heads and their rotation: one read and one write.
#include "kernels/launch.cuh"
#include "kernels/norm_rows.cuh"
#include "kernels/rope.cuh"
#include "ops/fused_norm.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"

namespace bifocal {
namespace {

template <class T>
struct NormRopeArrays {
  T* y;
  const T *x, *weight;
  const float *cos, *sin;
  std::int64_t rows;  // tokens * heads
  std::int64_t heads;
  float eps;
};

// Lanes, one group each, share R neighbouring heads of one token, as RmsNormForward does. A lane's
// partner in the rotation holds the same place in the other half. What is rotated is rounded to T
// first, as if it had been stored.
template <class T, int Lanes, int R>
__global__ void __launch_bounds__(kBlockThreads) norm_rope_kernel(NormRopeArrays<T> a) {
  constexpr int kTeams = kBlockThreads / Lanes;
  constexpr int kSize = kVectorSize<T>;
  const int lane = static_cast<int>(threadIdx.x) % Lanes;
  const std::int64_t team = static_cast<std::int64_t>(blockIdx.x) * kTeams + threadIdx.x / Lanes;
  const std::int64_t first = team * R;
  const bool valid = first < a.rows;  // R divides the heads; all lanes stay for the shuffles
  Packed<T> x[R][1];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    x[r][0] = {};
    if (valid) {
      x[r][0] = load_packed(a.x, (first + r) * Lanes + lane);
    }
  }
  Floats<kSize> cos{};
  Floats<kSize> sin{};
  if (valid) {
    const std::int64_t angle = first / a.heads * (Lanes / 2) + lane % (Lanes / 2);
    cos = load_floats<kSize>(a.cos, angle);
    sin = load_floats<kSize>(a.sin, angle);
  }
  const Packed<T> weight = load_packed(a.weight, lane);
  const bool is_low = lane < Lanes / 2;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const float inverse = inverse_rms<Lanes, 1>(x[r], static_cast<float>(Lanes * kSize), a.eps);
    const Packed<T> own = normed(x[r][0], inverse, weight);
    Packed<T> partner;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      partner.word[w] = __shfl_xor_sync(kAllLanes, own.word[w], Lanes / 2);
    }
    float y[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const Pair pair = is_low ? Pair{own[i], partner[i]} : Pair{partner[i], own[i]};
      const Pair turned = rotated(pair, cos.element[i], sin.element[i]);
      y[i] = is_low ? turned.low : turned.high;
    }
    if (valid) {
      store_packed(a.y, (first + r) * Lanes + lane, Packed<T>::of(y));
    }
  }
}

template <class T, int Lanes>
void launch(CudaStream& stream, const NormRopeArrays<T>& a) {
  constexpr int kTeams = kBlockThreads / Lanes;
  constexpr int kHeads = 4;  // of a team at once
  if (a.heads % kHeads == 0) {
    norm_rope_kernel<T, Lanes, kHeads>
        <<<grid_of(ceil_div(a.rows, kTeams * kHeads)), kBlockThreads, 0, stream.handle()>>>(a);
  } else {
    norm_rope_kernel<T, Lanes, 1>
        <<<grid_of(ceil_div(a.rows, kTeams)), kBlockThreads, 0, stream.handle()>>>(a);
  }
  BIFOCAL_CUDA(cudaGetLastError());
}

}  // namespace

void run(CudaStream& stream, const NormRope& op) {
  require_type("norm_rope", "cos", op.cos, DType::f32);
  require_type("norm_rope", "sin", op.sin, DType::f32);
  if (op.x.size() == 0) {
    return;
  }
  dispatch_device("norm_rope", op.y.dtype, [&](auto zero) {
    using T = decltype(zero);
    NormRopeArrays<T> a{};
    a.y = op.y.as<T>();
    a.x = op.x.as<T>();
    a.weight = op.weight.as<T>();
    a.cos = op.cos.as<float>();
    a.sin = op.sin.as<float>();
    a.rows = op.x.shape[0] * op.x.shape[1];
    a.heads = op.x.shape[1];
    a.eps = static_cast<float>(op.eps);
    const std::int64_t dim = op.x.shape[2];
    const std::int64_t groups = dim % kVectorSize<T> == 0 ? dim / kVectorSize<T> : 0;
    const bool aligned = is_aligned(16, a.y, a.x, a.weight, a.cos, a.sin);
    if (aligned && groups == 8) {
      launch<T, 8>(stream, a);
    } else if (aligned && groups == 16) {
      launch<T, 16>(stream, a);
    } else if (aligned && groups == 32) {
      launch<T, 32>(stream, a);
    } else {
      const Shape rows{a.rows, dim};
      run(stream, RmsNormForward{op.y.reshape(rows), op.x.reshape(rows), op.weight, op.eps});
      run(stream, RopeRotate{op.y, op.cos, op.sin});
    }
  });
}

}  // namespace bifocal
