// Reading of JSON-lines files.
#include "data/json_lines.h"

#include <utility>

#include "core/error.h"
#include "data/text_source.h"
#include "data/utf8.h"

namespace bifocal {

namespace {

// The first whole characters that fit `limit` bytes.
std::string_view cut(std::string_view text, std::size_t limit) {
  std::string_view start = text.substr(0, limit);
  start.remove_suffix(start.size() < text.size() ? cut_utf8_bytes(start) : 0);
  return start;
}

// What the library says, without the line that it counts within our line, and short: it repeats
// the last word read, which may be a whole document.
std::string reason_of(const nlohmann::json::exception& error) {
  constexpr std::size_t kLongest = 300;
  std::string_view reason = error.what();
  const std::size_t start = reason.find("syntax error");
  reason.remove_prefix(start == std::string_view::npos ? 0 : start);
  const std::string_view shown = cut(reason, kLongest);
  return std::string(shown) + (shown.size() < reason.size() ? ".." : "");
}

std::string show(const nlohmann::json& value) {
  // A nested value is not written out: that recurses as deep as it is nested.
  return value.is_structured() ? value.type_name() : std::string(cut(value.dump(), 40));
}

}  // namespace

nlohmann::json parse_json_line(std::string_view line) {
  if (const auto wrong = find_invalid_utf8(line)) {
    fail("[json_lines] byte {}: wanted UTF-8, got 0x{:02x}: convert the text",
         *wrong + 1,
         static_cast<unsigned char>(line[*wrong]));
  }
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
                    show(item));
    values.push_back(item.get<std::int32_t>());
  }
  return values;
}

}  // namespace bifocal
