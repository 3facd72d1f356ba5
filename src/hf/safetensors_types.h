// Type names of the safetensors format.
#pragma once

#include <optional>
#include <string_view>

#include "core/dtype.h"

namespace bifocal {

// "BF16"
std::string_view safetensors_name(DType type);

// Nothing for a name that we have no type for.
std::optional<DType> parse_safetensors_type(std::string_view name);

}  // namespace bifocal
