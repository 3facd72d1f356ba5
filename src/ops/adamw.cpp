// One AdamW update, element by element.
#include "ops/adamw.h"

#include <cmath>

#include "ops/vector_math.h"

namespace bifocal {

namespace {

constexpr const char* kWhere = "adamw";

template <class T>
void update(const AdamW& op) {
  constexpr std::int64_t kGrain = 64;
  T* parameter = op.parameter.as<T>();
  T* first = op.first.as<T>();
  T* second = op.second.as<T>();
  const T* gradient = op.gradient.as<T>();
  const auto beta1 = static_cast<T>(op.beta1);
  const auto beta2 = static_cast<T>(op.beta2);
  const auto gain1 = static_cast<T>(1.0 - op.beta1);
  const auto gain2 = static_cast<T>(1.0 - op.beta2);
  const auto step = static_cast<double>(op.step);
  const auto rate = static_cast<T>(op.rate / (1.0 - std::pow(op.beta1, step)));
  const auto correction2 = static_cast<T>(1.0 / (1.0 - std::pow(op.beta2, step)));
  const auto keep = static_cast<T>(1.0 - op.rate * op.decay);
  const auto scale = static_cast<T>(op.grad_scale);
  const auto eps = static_cast<T>(op.eps);
  parallel_ranges(op.parameter.size(), kGrain, 2, [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) {
      const T g = scale * gradient[i];
      const T m = beta1 * first[i] + gain1 * g;
      const T v = beta2 * second[i] + gain2 * (g * g);
      first[i] = m;
      second[i] = v;
      parameter[i] = keep * parameter[i] - rate * m / (std::sqrt(v * correction2) + eps);
    }
  });
}

}  // namespace

void AdamW::check() const {
  const Shape shape{parameter.shape[0]};
  require_tensor(kWhere, "parameter", parameter, parameter.dtype, shape);
  require_tensor(kWhere, "first", first, parameter.dtype, shape);
  require_tensor(kWhere, "second", second, parameter.dtype, shape);
  require_tensor(kWhere, "gradient", gradient, parameter.dtype, shape);
  BIFOCAL_REQUIRE(
      step >= 1, "[{}] wanted a step from 1 on, got {}: steps count from 1", kWhere, step);
}

void run(CpuStream&, const AdamW& op) {
  dispatch_real(kWhere, op.parameter.dtype, [&]<class T>(T) { update<T>(op); });
}

}  // namespace bifocal
