// SwiGLU forward and backward: one read of each argument, one write of each result.
#include "kernels/launch.cuh"
#include "ops/swiglu.h"

namespace bifocal {
namespace {

// exp(-|x|) cannot overflow, so that x below -88 still gives exp(x) rather than 1 / inf. The
// divisor lies in [1, 2], where the fast quotient is off by 2 ulp at most; the exact one would take
// as long as the memory does.
__device__ inline float sigmoid(float x) {
  const float e = expf(-fabsf(x));
  return __fdividef(x < 0.0F ? e : 1.0F, 1.0F + e);
}

template <class T>
struct SwigluForwardBody {
  T* y;
  const T* gate;
  const T* up;

  template <int N>
  __device__ void vector(std::int64_t group) const {
    auto g = load_floats<N>(gate, group);
    const auto u = load_floats<N>(up, group);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      g.element[i] *= sigmoid(g.element[i]) * u.element[i];
    }
    store_floats<N>(y, group, g);
  }
};

// With s = sigmoid(gate): d_up = d_y gate s; d_gate = d_y up s (1 + gate (1 - s)). Either result
// may lie over d_y, so a thread reads its group whole before it writes.
template <class T>
struct SwigluBackwardBody {
  T* d_gate;
  T* d_up;
  const T* d_y;
  const T* gate;
  const T* up;

  template <int N>
  __device__ void vector(std::int64_t group) const {
    const auto d = load_floats<N>(d_y, group);
    const auto g = load_floats<N>(gate, group);
    const auto u = load_floats<N>(up, group);
    Floats<N> to_gate;
    Floats<N> to_up;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float x = g.element[i];
      const float s = sigmoid(x);
      to_up.element[i] = d.element[i] * x * s;
      to_gate.element[i] = d.element[i] * u.element[i] * s * (1.0F + x * (1.0F - s));
    }
    store_floats<N>(d_gate, group, to_gate);
    store_floats<N>(d_up, group, to_up);
  }
};

}  // namespace

void run(CudaStream& stream, const SwigluForward& op) {
  require_type("swiglu", "gate", op.gate, op.y.dtype);
  require_type("swiglu", "up", op.up, op.y.dtype);
  dispatch_device("swiglu", op.y.dtype, [&](auto zero) {
    using T = decltype(zero);
    const SwigluForwardBody<T> body{op.y.as<T>(), op.gate.as<T>(), op.up.as<T>()};
    const bool aligned = is_aligned(16, body.y, body.gate, body.up);
    launch_flat<kVectorSize<T>>(stream, op.y.size(), aligned, body);
  });
}

void run(CudaStream& stream, const SwigluBackward& op) {
  require_type("swiglu_backward", "d_up", op.d_up, op.d_gate.dtype);
  require_type("swiglu_backward", "d_y", op.d_y, op.d_gate.dtype);
  require_type("swiglu_backward", "gate", op.gate, op.d_gate.dtype);
  require_type("swiglu_backward", "up", op.up, op.d_gate.dtype);
  dispatch_device("swiglu_backward", op.d_gate.dtype, [&](auto zero) {
    using T = decltype(zero);
    const SwigluBackwardBody<T> body{
        op.d_gate.as<T>(), op.d_up.as<T>(), op.d_y.as<T>(), op.gate.as<T>(), op.up.as<T>()};
    const bool aligned = is_aligned(16, body.d_gate, body.d_up, body.d_y, body.gate, body.up);
    launch_flat<kVectorSize<T>>(stream, op.d_gate.size(), aligned, body);
  });
}

}  // namespace bifocal
