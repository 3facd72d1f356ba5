// Half precision conversions.
#include "core/dtype.h"

namespace bifocal {

float to_float(Float16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000U) << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 0x1fU;
  const std::uint32_t mantissa = x.bits & 0x3ffU;
  if (exponent == 0x1fU) {
    return std::bit_cast<float>(sign | 0x7f800000U | (mantissa << 13));
  }
  if (exponent != 0) {
    return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (mantissa << 13));
  }
  const float subnormal = std::ldexp(static_cast<float>(mantissa), -24);
  return sign != 0 ? -subnormal : subnormal;
}

Float16 to_float16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const float magnitude = std::fabs(x);
  if (std::isnan(x)) {
    return {static_cast<std::uint16_t>(sign | 0x7e00U)};
  }
  if (magnitude >= 65520.0F) {
    return {static_cast<std::uint16_t>(sign | 0x7c00U)};
  }
  if (magnitude < 6.103515625e-05F) {  // subnormal: a multiple of 2^-24; nearbyint rounds to even
    const auto units = static_cast<std::uint16_t>(std::nearbyint(std::ldexp(magnitude, 24)));
    return {static_cast<std::uint16_t>(sign | units)};
  }
  const std::uint32_t rounded = (bits & 0x7fffffffU) + 0xfffU + ((bits >> 13) & 1U);
  return {static_cast<std::uint16_t>(sign | ((rounded - 0x38000000U) >> 13))};
}

}  // namespace bifocal
