// Conversion loops, one per pair of types.
#include "hf/convert.h"

#include <cstring>
#include <type_traits>

namespace bifocal {

namespace {

// The widest type on the way: float holds bf16 and f16 exactly.
template <class T>
auto widen(T value) {
  if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>) {
    return to_float(value);
  } else {
    return value;
  }
}

template <class To, class From>
To narrow(From value) {
  if constexpr (std::is_same_v<To, BFloat16>) {
    return to_bfloat16(static_cast<float>(value));
  } else if constexpr (std::is_same_v<To, Float16>) {
    return to_float16(static_cast<float>(value));
  } else {
    return static_cast<To>(value);
  }
}

template <class From, class To>
void convert(const std::byte* source, To* destination, std::int64_t count) {
#pragma omp parallel for schedule(static) if (count > 65536)
  for (std::int64_t i = 0; i < count; ++i) {
    From value;  // a mapped file may lay tensors at any byte
    std::memcpy(&value, source + i * static_cast<std::int64_t>(sizeof(From)), sizeof(From));
    destination[i] = narrow<To>(widen(value));
  }
}

// Calls function(T{}) for a floating type; false for an integer type.
template <class Function>
bool dispatch_floating(DType type, Function&& function) {
  switch (type) {
    case DType::f64:
      function(double{});
      return true;
    case DType::f32:
      function(float{});
      return true;
    case DType::bf16:
      function(BFloat16{});
      return true;
    case DType::f16:
      function(Float16{});
      return true;
    case DType::i64:
    case DType::i32:
    case DType::u8:
      return false;
  }
  return false;
}

}  // namespace

void convert_elements(const char* what,
                      const std::byte* source,
                      DType type,
                      const TensorView& destination) {
  if (type == destination.dtype) {
    if (destination.size() > 0) {
      std::memcpy(destination.data, source, destination.bytes());
    }
    return;
  }
  bool known = false;
  dispatch_floating(type, [&](auto from) {
    known = dispatch_floating(destination.dtype, [&](auto to) {
      convert<decltype(from)>(source, destination.as<decltype(to)>(), destination.size());
    });
  });
  BIFOCAL_REQUIRE(known,
                  "[safetensors] {}: cannot turn {} into {}: integers are read as their own type "
                  "only",
                  what,
                  name_of(type),
                  name_of(destination.dtype));
}

}  // namespace bifocal
