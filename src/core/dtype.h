// Element types: sizes, names, conversions and the dispatch of host code over them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <string_view>

#include "core/error.h"

namespace bifocal {

enum class DType : std::uint8_t { f64, f32, bf16, f16, i64, i32, u8 };

// Upper half of a float32. Conversion rounds to nearest even.
struct BFloat16 {
  std::uint16_t bits = 0;
};

// IEEE half precision, read from checkpoints and never computed with.
struct Float16 {
  std::uint16_t bits = 0;
};

inline float to_float(BFloat16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

float to_float(Float16 x);

inline BFloat16 to_bfloat16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (std::isnan(x)) {
    return {static_cast<std::uint16_t>((bits >> 16) | 0x40U)};
  }
  return {static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16)};
}

Float16 to_float16(float x);

constexpr std::size_t size_of(DType type) {
  switch (type) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::u8:
      return 1;
  }
  return 0;
}

constexpr std::string_view name_of(DType type) {
  switch (type) {
    case DType::f64:
      return "float64";
    case DType::f32:
      return "float32";
    case DType::bf16:
      return "bfloat16";
    case DType::f16:
      return "float16";
    case DType::i64:
      return "int64";
    case DType::i32:
      return "int32";
    case DType::u8:
      return "uint8";
  }
  return "unknown";
}

// The type of what sums over many values beside tensors of `type` (gradients of weights, states,
// log-sum-exps, logits): float32 beside 16 bits, else the same.
constexpr DType sum_type(DType type) {
  return type == DType::bf16 || type == DType::f16 ? DType::f32 : type;
}

template <class T>
struct DTypeOf;

template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::f64;
};

template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::f32;
};

template <>
struct DTypeOf<BFloat16> {
  static constexpr DType value = DType::bf16;
};

template <>
struct DTypeOf<Float16> {
  static constexpr DType value = DType::f16;
};

template <>
struct DTypeOf<std::int64_t> {
  static constexpr DType value = DType::i64;
};

template <>
struct DTypeOf<std::int32_t> {
  static constexpr DType value = DType::i32;
};

template <>
struct DTypeOf<std::uint8_t> {
  static constexpr DType value = DType::u8;
};

template <class T>
inline constexpr DType kDTypeOf = DTypeOf<T>::value;

// Calls function(T{}) with T = float or double; any other type is an error that names `where`.
template <class Function>
decltype(auto) dispatch_real(std::string_view where, DType type, Function&& function) {
  if (type == DType::f64) {
    return function(double{});
  }
  BIFOCAL_REQUIRE(type == DType::f32,
                  "[{}] wanted float32 or float64 tensors, got {}: the CPU computes in these two",
                  where,
                  name_of(type));
  return function(float{});
}

}  // namespace bifocal
