// The mix of far and near sight: one read of each argument, one write of each result.
#include "kernels/launch.cuh"
#include "kernels/warp.cuh"
#include "ops/bifocal_gate.h"

namespace bifocal {
namespace {

// o and 1 - o; the second stays exact where o rounds to 1.
struct Gate {
  float open, shut;

  __device__ explicit Gate(float x) {
    const float e = expf(-fabsf(x));
    const float large = 1.0F / (1.0F + e);
    const float small = e / (1.0F + e);
    open = x < 0.0F ? small : large;
    shut = x < 0.0F ? large : small;
  }
};

// The row of a group: numbers of 32 bits are divided much faster.
__device__ inline std::int64_t row_of(std::int64_t group, std::int64_t groups) {
  if (group <= 0xffffffffLL) {
    return static_cast<std::uint32_t>(group) / static_cast<std::uint32_t>(groups);
  }
  return group / groups;
}

template <class T>
struct GateForwardBody {
  T* y;
  const T *far, *near, *gate;
  std::int64_t dim;

  // Where N > 1, dim is a multiple of N.
  template <int N>
  __device__ void vector(std::int64_t group) const {
    auto mix = load_floats<N>(far, group);
    const auto n = load_floats<N>(near, group);
    const Gate o(load_float(gate[row_of(group, dim / N)]));
#pragma unroll
    for (int i = 0; i < N; ++i) {
      mix.element[i] = o.open * mix.element[i] + o.shut * n.element[i];
    }
    store_floats<N>(y, group, mix);
  }
};

template <class T>
struct GateBackwardArrays {
  T *d_far, *d_near, *d_gate;
  const T *d_y, *far, *near, *gate;
  std::int64_t rows;
  int groups;  // of N elements in a row
};

// Some lanes of a warp for each row:
//   d_far = o d_y, d_near = (1 - o) d_y, d_gate = o (1 - o) d_y . (far - near).
template <class T, int N, int Lanes>
__global__ void __launch_bounds__(kBlockThreads) gate_backward_kernel(GateBackwardArrays<T> a) {
  constexpr int kRows = kBlockThreads / Lanes;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRows + threadIdx.x / Lanes;
  const int lane = static_cast<int>(threadIdx.x) % Lanes;
  const bool valid = row < a.rows;  // all lanes of a warp stay for its sums
  const Gate o(valid ? load_float(a.gate[row]) : 0.0F);
  float sum = 0.0F;
  for (int i = lane; valid && i < a.groups; i += Lanes) {
    const std::int64_t group = row * a.groups + i;
    const auto d = load_floats<N>(a.d_y, group);
    const auto f = load_floats<N>(a.far, group);
    const auto n = load_floats<N>(a.near, group);
    Floats<N> to_far;
    Floats<N> to_near;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      sum += d.element[e] * (f.element[e] - n.element[e]);
      to_far.element[e] = o.open * d.element[e];
      to_near.element[e] = o.shut * d.element[e];
    }
    store_floats<N>(a.d_far, group, to_far);
    store_floats<N>(a.d_near, group, to_near);
  }
  sum = warp_sum<Lanes>(sum);
  if (valid && lane == 0) {
    a.d_gate[row] = store_as<T>(o.open * o.shut * sum);
  }
}

// As few lanes as one pass over a row needs.
template <class T, int N>
void launch_backward(CudaStream& stream, const GateBackwardArrays<T>& a) {
  const auto launch = [&](auto* kernel, int lanes) {
    kernel<<<grid_of(ceil_div(a.rows, kBlockThreads / lanes)), kBlockThreads, 0, stream.handle()>>>(
        a);
    BIFOCAL_CUDA(cudaGetLastError());
  };
  if (a.groups <= 8) {
    launch(gate_backward_kernel<T, N, 8>, 8);
  } else if (a.groups <= 16) {
    launch(gate_backward_kernel<T, N, 16>, 16);
  } else {
    launch(gate_backward_kernel<T, N, kWarp>, kWarp);
  }
}

}  // namespace

void run(CudaStream& stream, const BifocalGateForward& op) {
  require_type("bifocal_gate", "gate", op.gate, op.y.dtype);
  dispatch_device("bifocal_gate", op.y.dtype, [&](auto zero) {
    using T = decltype(zero);
    const GateForwardBody<T> body{
        op.y.as<T>(), op.far.as<T>(), op.near.as<T>(), op.gate.as<T>(), op.far.shape[2]};
    const bool aligned =
        is_aligned(16, body.y, body.far, body.near) && body.dim % kVectorSize<T> == 0;
    launch_flat<kVectorSize<T>>(stream, op.y.size(), aligned, body);
  });
}

void run(CudaStream& stream, const BifocalGateBackward& op) {
  if (op.gate.size() == 0) {
    return;
  }
  dispatch_device("bifocal_gate", op.d_far.dtype, [&](auto zero) {
    using T = decltype(zero);
    GateBackwardArrays<T> a{};
    a.d_far = op.d_far.as<T>();
    a.d_near = op.d_near.as<T>();
    a.d_gate = op.d_gate.as<T>();
    a.d_y = op.d_y.as<T>();
    a.far = op.far.as<T>();
    a.near = op.near.as<T>();
    a.gate = op.gate.as<T>();
    a.rows = op.gate.size();
    const auto dim = static_cast<int>(op.far.shape[2]);
    constexpr int kGroup = kVectorSize<T>;
    if (dim % kGroup == 0 && is_aligned(16, a.d_far, a.d_near, a.d_y, a.far, a.near)) {
      a.groups = dim / kGroup;
      launch_backward<T, kGroup>(stream, a);
    } else {
      a.groups = dim;
      launch_backward<T, 1>(stream, a);
    }
  });
}

}  // namespace bifocal
