// AdamW: one read of parameter, moments and gradient, one write of parameter and moments.
#include <cmath>

#include "kernels/launch.cuh"
#include "ops/adamw.h"

namespace bifocal {
namespace {

template <class T>
struct AdamWBody {
  T* parameter;
  T* first;
  T* second;
  const T* gradient;
  float beta1, rest1;  // rest = 1 - beta, formed in double
  float beta2, rest2;
  float first_correction;   // 1 / (1 - beta1^step)
  float second_correction;  // 1 / (1 - beta2^step)
  float rate, eps, shrink, grad_scale;

  template <int N>
  __device__ void vector(std::int64_t group) const {
    auto p = load_vector<N>(parameter, group);
    auto m = load_vector<N>(first, group);
    auto v = load_vector<N>(second, group);
    const auto d = load_vector<N>(gradient, group);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float g = grad_scale * load_float(d.element[i]);
      const float m_new = beta1 * load_float(m.element[i]) + rest1 * g;
      const float v_new = beta2 * load_float(v.element[i]) + rest2 * g * g;
      const float size = sqrtf(v_new * second_correction) + eps;
      const float p_new =
          shrink * load_float(p.element[i]) - rate * (m_new * first_correction) / size;
      m.element[i] = store_as<T>(m_new);
      v.element[i] = store_as<T>(v_new);
      p.element[i] = store_as<T>(p_new);
    }
    store_vector<N>(parameter, group, p);
    store_vector<N>(first, group, m);
    store_vector<N>(second, group, v);
  }
};

}  // namespace

void run(CudaStream& stream, const AdamW& op) {
  require_type("adamw", "first", op.first, op.parameter.dtype);
  require_type("adamw", "second", op.second, op.parameter.dtype);
  require_type("adamw", "gradient", op.gradient, op.parameter.dtype);
  dispatch_device("adamw", op.parameter.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto step = static_cast<double>(op.step);
    AdamWBody<T> body{};
    body.parameter = op.parameter.as<T>();
    body.first = op.first.as<T>();
    body.second = op.second.as<T>();
    body.gradient = op.gradient.as<T>();
    body.beta1 = static_cast<float>(op.beta1);
    body.rest1 = static_cast<float>(1.0 - op.beta1);
    body.beta2 = static_cast<float>(op.beta2);
    body.rest2 = static_cast<float>(1.0 - op.beta2);
    body.first_correction = static_cast<float>(1.0 / (1.0 - std::pow(op.beta1, step)));
    body.second_correction = static_cast<float>(1.0 / (1.0 - std::pow(op.beta2, step)));
    body.rate = static_cast<float>(op.rate);
    body.eps = static_cast<float>(op.eps);
    body.shrink = static_cast<float>(1.0 - op.rate * op.decay);
    body.grad_scale = static_cast<float>(op.grad_scale);
    const bool aligned = is_aligned(16, body.parameter, body.first, body.second, body.gradient);
    launch_flat<kVectorSize<T>>(stream, op.parameter.size(), aligned, body);
  });
}

}  // namespace bifocal
