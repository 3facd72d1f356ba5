// One AdamW update, element by element.
#include "ops/adamw.h"

#include <cmath>
#include <type_traits>

#include "ops/vector_math.h"

namespace bifocal {

namespace {

constexpr const char* kWhere = "adamw";

template <class T, class M>
T moment_of(M value) {
  if constexpr (std::is_same_v<M, BFloat16>) {
    return to_float(value);
  } else {
    return value;
  }
}

template <class M, class T>
M stored(T value) {
  if constexpr (std::is_same_v<M, BFloat16>) {
    return to_bfloat16(static_cast<float>(value));
  } else {
    return value;
  }
}

// M: type of the moments.
template <class T, class M>
void update(const AdamW& op) {
  constexpr std::int64_t kGrain = 64;
  T* parameter = op.parameter.as<T>();
  M* first = op.first.as<M>();
  M* second = op.second.as<M>();
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
      const T m = beta1 * moment_of<T>(first[i]) + gain1 * g;
      const T v = beta2 * moment_of<T>(second[i]) + gain2 * (g * g);
      first[i] = stored<M>(m);
      second[i] = stored<M>(v);
      parameter[i] = keep * parameter[i] - rate * m / (std::sqrt(v * correction2) + eps);
    }
  });
  if (op.copy) {
    auto* copy = op.copy.as<BFloat16>();
    for (std::int64_t i = 0; i < op.copy.size(); ++i) {
      copy[i] = stored<BFloat16>(parameter[i]);
    }
  }
}

}  // namespace

void AdamW::check() const {
  const Shape shape{parameter.shape[0]};
  require_tensor(kWhere, "parameter", parameter, parameter.dtype, shape);
  const DType moments = first.dtype == DType::bf16 ? DType::bf16 : parameter.dtype;
  require_tensor(kWhere, "first", first, moments, shape);
  require_tensor(kWhere, "second", second, moments, shape);
  require_tensor(kWhere, "gradient", gradient, parameter.dtype, shape);
  if (copy) {
    require_tensor(kWhere, "copy", copy, DType::bf16, shape);
  }
  BIFOCAL_REQUIRE(
      step >= 1, "[{}] wanted a step from 1 on, got {}: steps count from 1", kWhere, step);
}

void run(CpuStream&, const AdamW& op) {
  dispatch_real(kWhere, op.parameter.dtype, [&]<class T>(T) {
    if (op.first.dtype == DType::bf16) {
      update<T, BFloat16>(op);
    } else {
      update<T, T>(op);
    }
  });
}

}  // namespace bifocal
