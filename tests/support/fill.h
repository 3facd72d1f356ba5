// Seeded contents for test tensors.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/memory.h"
#include "core/random.h"
#include "core/tensor.h"

namespace bifocal::test {

// Sets element i of a float32, float64, int32, int64 or uint8 tensor to value(i).
inline void fill(const TensorView& x, const std::function<double(std::int64_t)>& value) {
  const auto set = [&]<class T>(T) {
    T* data = x.as<T>();
    for (std::int64_t i = 0; i < x.size(); ++i) {
      data[i] = static_cast<T>(value(i));
    }
  };
  switch (x.dtype) {
    case DType::f64:
      return set(double{});
    case DType::f32:
      return set(float{});
    case DType::i32:
      return set(std::int32_t{});
    case DType::i64:
      return set(std::int64_t{});
    case DType::u8:
      return set(std::uint8_t{});
    default:
      fail("[fill] wanted float32, float64, int32, int64 or uint8, got {}: fill another type",
           name_of(x.dtype));
  }
}

// mean + deviation * standard normal; the same seed gives float32 the rounded values of float64.
inline void fill_normal(const TensorView& x,
                        std::uint64_t seed,
                        double deviation = 1.0,
                        double mean = 0.0) {
  fill(x, [&](std::int64_t i) {
    return mean + deviation * random_normal(seed, 0, static_cast<std::uint64_t>(i));
  });
}

// Uniform integers in [0, bound).
inline void fill_below(const TensorView& x, std::uint64_t seed, std::int64_t bound) {
  fill(x, [&](std::int64_t i) {
    return static_cast<double>(
        random_below(static_cast<std::uint64_t>(bound), seed, 1, static_cast<std::uint64_t>(i)));
  });
}

// A new tensor of normals.
inline Tensor normal_tensor(
    Memory& memory, DType dtype, const Shape& shape, std::uint64_t seed, double deviation = 1.0) {
  Tensor x = memory.empty(Region::activations, dtype, shape);
  fill_normal(x, seed, deviation);
  return x;
}

// A new one-dimensional tensor of the given elements.
template <class T>
Tensor tensor_of(Memory& memory, const std::vector<T>& values) {
  Tensor x = memory.empty(
      Region::activations, kDTypeOf<T>, Shape{static_cast<std::int64_t>(values.size())});
  std::copy(values.begin(), values.end(), x.as<T>());
  return x;
}

// A copy in another (or the same) real type: double copies of stored inputs feed definitions.
inline Tensor copy_as(Memory& memory, DType dtype, const ConstTensorView& x) {
  Tensor y = memory.empty(Region::activations, dtype, x.shape);
  dispatch_real("copy_as", x.dtype, [&]<class T>(T) {
    const T* data = x.as<T>();
    fill(y, [&](std::int64_t i) { return static_cast<double>(data[i]); });
  });
  return y;
}

}  // namespace bifocal::test
