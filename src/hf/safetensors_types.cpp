// Type names of the safetensors format.
#include "hf/safetensors_types.h"

namespace bifocal {

std::string_view safetensors_name(DType type) {
  switch (type) {
    case DType::f64:
      return "F64";
    case DType::f32:
      return "F32";
    case DType::bf16:
      return "BF16";
    case DType::f16:
      return "F16";
    case DType::i64:
      return "I64";
    case DType::i32:
      return "I32";
    case DType::u8:
      return "U8";
  }
  return "unknown";
}

std::optional<DType> parse_safetensors_type(std::string_view name) {
  for (const DType type :
       {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i64, DType::i32, DType::u8}) {
    if (name == safetensors_name(type)) {
      return type;
    }
  }
  return std::nullopt;
}

}  // namespace bifocal
