// JSON-lines files, line by line.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace bifocal {

// The value of one line. Throws Error that names the byte (from 1) for a line that is no UTF-8 or
// no JSON.
nlohmann::json parse_json_line(std::string_view line);

// Whether a line holds nothing but white space.
bool is_blank(std::string_view line);

// Calls visit for each line that is not blank; gzip and zstd are read as in text_source.h. Throws
// Error that names file and line for a line that is no JSON, and adds file and line to every error
// that visit throws.
void for_each_json_line(const std::string& path,
                        const std::function<void(const nlohmann::json&)>& visit);

// The integers of an array, each from -2^31 to 2^31 - 1. Throws Error for anything else.
std::vector<std::int32_t> int32_array(const nlohmann::json& array);

}  // namespace bifocal
