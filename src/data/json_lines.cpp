// Reading of JSON-lines files.
#include "data/json_lines.h"

#include <utility>

#include "core/error.h"
#include "core/utf8.h"
#include "data/text_source.h"

namespace bifocal {

namespace {

// What the library says, without the line that it counts within our line, and short: it repeats
// the last word read, which may be a whole document.
std::string reason_of(const nlohmann::json::exception& error) {
  constexpr std::size_t kLongest = 300;
  std::string_view reason = error.what();
  const std::size_t start = reason.find("syntax error");
  reason.remove_prefix(start == std::string_view::npos ? 0 : start);
  const std::string_view cut = cut_utf8(reason, kLongest);
  return std::string(cut) + (cut.size() < reason.size() ? ".." : "");
}

std::string shown(const nlohmann::json& value) {
  // A nested value is not written out: that recurses as deep as it is nested.
  return value.is_structured() ? value.type_name() : std::string(cut_utf8(value.dump(), 40));
}

}  // namespace

nlohmann::json parse_json_line(std::string_view line) {
  const std::size_t valid = valid_utf8_bytes(line);
  BIFOCAL_REQUIRE(valid == line.size(),
                  "[json_lines] byte {}: wanted UTF-8, got 0x{:02x}: convert the text",
                  valid + 1,
                  static_cast<unsigned char>(line[valid]));
  try {
    return nlohmann::json::parse(line);
  } catch (const nlohmann::json::parse_error& error) {
    fail("[json_lines] byte {}: wanted a JSON value: {}", error.byte, reason_of(error));
  } catch (const nlohmann::json::exception& error) {
    fail("[json_lines] wanted a JSON value: {}", reason_of(error));
  }
}

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r") == std::string_view::npos;
}

void for_each_json_line(const std::string& path,
                        const std::function<void(const nlohmann::json&)>& visit) {
  LineReader reader(path);
  std::string line;
  while (reader.next(line)) {
    if (is_blank(line)) {
      continue;
    }
    try {
      visit(parse_json_line(line));
    } catch (const nlohmann::json::exception& error) {
      fail("[json_lines] {} ({}:{})", error.what(), path, reader.number());
    } catch (const Error& error) {
      fail("{} ({}:{})", error.what(), path, reader.number());
    }
  }
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
                    shown(item));
    values.push_back(item.get<std::int32_t>());
  }
  return values;
}

}  // namespace bifocal
