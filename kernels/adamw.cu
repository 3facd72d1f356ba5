// AdamW: one read of parameter, moments and gradient, one write of parameter and moments.
#include <algorithm>
#include <cmath>

#include "kernels/launch.cuh"
#include "ops/adamw.h"

namespace bifocal {
namespace {

// M: type of the moments. Copy: whether the parameter is also written as bfloat16.
template <class M, bool Copy>
struct AdamWBody {
  float* parameter;
  M* first;
  M* second;
  const float* gradient;
  BFloat16* copy;
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
    Vector<BFloat16, N> rounded;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float g = grad_scale * d.element[i];
      const float m_new = beta1 * load_float(m.element[i]) + rest1 * g;
      const float v_new = beta2 * load_float(v.element[i]) + rest2 * g * g;
      const float size = sqrtf(v_new * second_correction) + eps;
      p.element[i] = shrink * p.element[i] - rate * (m_new * first_correction) / size;
      m.element[i] = store_as<M>(m_new);
      v.element[i] = store_as<M>(v_new);
      rounded.element[i] = store_as<BFloat16>(p.element[i]);
    }
    store_vector<N>(parameter, group, p);
    store_vector<N>(first, group, m);
    store_vector<N>(second, group, v);
    if constexpr (Copy) {
      store_vector<N>(copy, group, rounded);
    }
  }

  // Moves the first group `elements` on.
  void advance(std::int64_t elements) {
    parameter += elements;
    first += elements;
    second += elements;
    gradient += elements;
    copy += Copy ? elements : 0;
  }
};

// A range of a parameter may begin at any element of its unit's tensors; the elements before the
// first multiple of four are then done alone.
template <class M, bool Copy>
void launch(CudaStream& stream, const AdamW& op) {
  constexpr int kGroup = kVectorSize<float>;
  const auto step = static_cast<double>(op.step);
  AdamWBody<M, Copy> body{};
  body.parameter = op.parameter.as<float>();
  body.first = op.first.as<M>();
  body.second = op.second.as<M>();
  body.gradient = op.gradient.as<float>();
  body.copy = Copy ? op.copy.as<BFloat16>() : nullptr;
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

  const std::int64_t size = op.parameter.size();
  const auto past = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(body.parameter) /
                                              sizeof(float) % kGroup);
  const std::int64_t head = std::min<std::int64_t>(size, (kGroup - past) % kGroup);
  body.advance(head);
  const bool aligned = is_aligned(kGroup * sizeof(float), body.parameter, body.gradient) &&
                       is_aligned(kGroup * sizeof(M), body.first, body.second) &&
                       is_aligned(kGroup * sizeof(BFloat16), body.copy);
  if (aligned) {
    launch_flat<kGroup>(stream, size - head, true, body, head);
  } else {
    body.advance(-head);
    launch_flat<kGroup>(stream, size, false, body);
  }
}

}  // namespace

void run(CudaStream& stream, const AdamW& op) {
  require_type("adamw", "parameter", op.parameter, DType::f32);
  require_type("adamw", "gradient", op.gradient, DType::f32);
  dispatch_device("adamw", op.first.dtype, [&](auto zero) {
    using M = decltype(zero);
    if (op.copy) {
      launch<M, true>(stream, op);
    } else {
      launch<M, false>(stream, op);
    }
  });
}

}  // namespace bifocal
