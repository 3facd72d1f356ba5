// The mix of far and near sight: one read of each argument, one write of each result.
#include "kernels/launch.cuh"
#include "ops/bifocal_gate.h"

namespace bifocal {
namespace {

constexpr int kWarp = 32;
constexpr int kRowsPerBlock = kBlockThreads / kWarp;

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

template <class T>
struct GateForwardBody {
  T* y;
  const T *far, *near, *gate;
  std::int64_t dim;

  // Where N > 1, dim is a multiple of N.
  template <int N>
  __device__ void vector(std::int64_t group) const {
    const auto f = load_vector<N>(far, group);
    const auto n = load_vector<N>(near, group);
    const Gate o(load_float(gate[group * N / dim]));
    Vector<T, N> out;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      out.element[i] =
          store_as<T>(o.open * load_float(f.element[i]) + o.shut * load_float(n.element[i]));
    }
    store_vector<N>(y, group, out);
  }
};

template <class T>
struct GateBackwardArrays {
  T *d_far, *d_near, *d_gate;
  const T *d_y, *far, *near, *gate;
  std::int64_t rows;
  int groups;  // of N elements in a row
};

// A warp for each row: d_far = o d_y, d_near = (1 - o) d_y, d_gate = o (1 - o) d_y . (far - near).
template <class T, int N>
__global__ void __launch_bounds__(kBlockThreads) gate_backward_kernel(GateBackwardArrays<T> a) {
  const std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= a.rows) {
    return;  // whole warps
  }
  const Gate o(load_float(a.gate[row]));
  const std::int64_t first = row * a.groups;
  float sum = 0.0F;
  for (int i = static_cast<int>(threadIdx.x) % kWarp; i < a.groups; i += kWarp) {
    const std::int64_t group = first + i;
    const auto d = load_vector<N>(a.d_y, group);
    const auto f = load_vector<N>(a.far, group);
    const auto n = load_vector<N>(a.near, group);
    Vector<T, N> to_far;
    Vector<T, N> to_near;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const float x = load_float(d.element[e]);
      sum += x * (load_float(f.element[e]) - load_float(n.element[e]));
      to_far.element[e] = store_as<T>(o.open * x);
      to_near.element[e] = store_as<T>(o.shut * x);
    }
    store_vector<N>(a.d_far, group, to_far);
    store_vector<N>(a.d_near, group, to_near);
  }
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffU, sum, distance);
  }
  if (threadIdx.x % kWarp == 0) {
    a.d_gate[row] = store_as<T>(o.open * o.shut * sum);
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
    const dim3 grid = grid_of(ceil_div(a.rows, kRowsPerBlock));
    const auto dim = static_cast<int>(op.far.shape[2]);
    constexpr int kGroup = kVectorSize<T>;
    if (dim % kGroup == 0 && is_aligned(16, a.d_far, a.d_near, a.d_y, a.far, a.near)) {
      a.groups = dim / kGroup;
      gate_backward_kernel<T, kGroup><<<grid, kBlockThreads, 0, stream.handle()>>>(a);
    } else {
      a.groups = dim;
      gate_backward_kernel<T, 1><<<grid, kBlockThreads, 0, stream.handle()>>>(a);
    }
    BIFOCAL_CUDA(cudaGetLastError());
  });
}

}  // namespace bifocal
