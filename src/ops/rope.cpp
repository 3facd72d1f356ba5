// Rotary positions.
#include "ops/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "ops/vector_math.h"
#include "ops/widened.h"

namespace bifocal {

namespace {

constexpr const char* kWhere = "rope";

template <class T>
void table(const RopeTable& op) {
  const std::int64_t half = op.frequencies.size();
  T* cosines = op.cos.as<T>();
  T* sines = op.sin.as<T>();
  const auto* positions = op.positions.as<std::int32_t>();
  const auto* frequencies = op.frequencies.as<double>();
  parallel_ranges(op.positions.size(), 1, 40 * half, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int64_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(positions[t]) * frequencies[i];
        cosines[t * half + i] = static_cast<T>(std::cos(angle));
        sines[t * half + i] = static_cast<T>(std::sin(angle));
      }
    }
  });
}

template <class T>
void rotate(const RopeRotate& op) {
  const std::int64_t heads = op.x.shape[1];
  const std::int64_t half = op.x.shape[2] / 2;
  const T sign = op.inverse ? -1 : 1;
  T* x = op.x.as<T>();
  const T* cosines = op.cos.as<T>();
  const T* sines = op.sin.as<T>();
  parallel_ranges(op.x.shape[0], 1, heads * half / 2, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const T* c = cosines + t * half;
      const T* s = sines + t * half;
      for (std::int64_t head = 0; head < heads; ++head) {
        T* first = x + (t * heads + head) * 2 * half;
        T* second = first + half;
#pragma omp simd
        for (std::int64_t i = 0; i < half; ++i) {
          const T a = first[i];
          const T b = second[i];
          const T turned = sign * s[i];
          first[i] = a * c[i] - b * turned;
          second[i] = b * c[i] + a * turned;
        }
      }
    }
  });
}

}  // namespace

std::vector<double> rope_frequencies(int head_dim, double theta, const RopeScaling& scaling) {
  std::vector<double> frequencies(static_cast<std::size_t>(head_dim / 2));
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const double plain = std::pow(theta, -2.0 * static_cast<double>(i) / head_dim);
    frequencies[i] = plain;
    if (scaling.factor != 1.0) {
      // Long waves are slowed down by factor, short ones kept, those between interpolated.
      const double turns = scaling.original_max_position * plain / (2.0 * std::numbers::pi);
      const double kept = std::clamp(
          (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor),
          0.0,
          1.0);
      frequencies[i] = (1.0 - kept) * plain / scaling.factor + kept * plain;
    }
  }
  return frequencies;
}

void RopeTable::check() const {
  const Shape shape{positions.shape[0], frequencies.shape[0]};
  require_tensor(kWhere, "positions", positions, DType::i32, {positions.shape[0]});
  require_tensor(kWhere, "frequencies", frequencies, DType::f64, {frequencies.shape[0]});
  require_tensor(kWhere, "cos", cos, cos.dtype, shape);
  require_tensor(kWhere, "sin", sin, cos.dtype, shape);
}

void RopeRotate::check() const {
  const Shape half{x.shape[0], x.shape[2] / 2};
  BIFOCAL_REQUIRE(x.shape[2] % 2 == 0,
                  "[{}] wanted an even head_dim, got {}: positions rotate pairs",
                  kWhere,
                  x.shape[2]);
  require_tensor(kWhere, "x", x, x.dtype, {x.shape[0], x.shape[1], x.shape[2]});
  require_tensor(kWhere, "cos", cos, sum_type(x.dtype), half);
  require_tensor(kWhere, "sin", sin, sum_type(x.dtype), half);
}

void run(CpuStream&, const RopeTable& op) {
  dispatch_real(kWhere, op.cos.dtype, [&]<class T>(T) { table<T>(op); });
}

void run(CpuStream& stream, const RopeRotate& op) {
  if (run_widened(stream, op, [](auto& o) { return std::tie(o.x, o.cos, o.sin); })) {
    return;
  }
  dispatch_real(kWhere, op.x.dtype, [&]<class T>(T) { rotate<T>(op); });
}

}  // namespace bifocal
