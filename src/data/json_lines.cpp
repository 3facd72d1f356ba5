// Reading of JSON-lines files.
#include "data/json_lines.h"

#include <fstream>
#include <utility>

#include "core/error.h"

namespace bifocal {

void for_each_json_line(const std::string& path,
                        const std::function<void(const nlohmann::json&)>& visit) {
  std::ifstream file(path);
  BIFOCAL_REQUIRE(file.good(), "[json_lines] cannot open {}: check the path", path);
  std::string line;
  for (std::int64_t number = 1; std::getline(file, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) {
      continue;
    }
    try {
      visit(nlohmann::json::parse(line));
    } catch (const nlohmann::json::exception& error) {
      fail("[json_lines] {}:{}: {}", path, number, error.what());
    } catch (const Error& error) {
      fail("{} ({}:{})", error.what(), path, number);
    }
  }
  BIFOCAL_REQUIRE(!file.bad(), "[json_lines] reading {} failed", path);
}

std::vector<std::int32_t> int32_array(const nlohmann::json& array) {
  BIFOCAL_REQUIRE(
      array.is_array(), "[json_lines] wanted an array of integers, got {}", array.type_name());
  std::vector<std::int32_t> values;
  values.reserve(array.size());
  for (const nlohmann::json& item : array) {
    // The library converts silently, and an unsigned number may not fit a signed one.
    const bool fits =
        (item.is_number_unsigned() && std::in_range<std::int32_t>(item.get<std::uint64_t>())) ||
        (item.is_number_integer() && !item.is_number_unsigned() &&
         std::in_range<std::int32_t>(item.get<std::int64_t>()));
    BIFOCAL_REQUIRE(fits,
                    "[json_lines] entry {} should be an integer of 32 bits, got {}",
                    values.size(),
                    item.dump());
    values.push_back(item.get<std::int32_t>());
  }
  return values;
}

}  // namespace bifocal
