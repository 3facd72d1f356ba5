// UTF-8 as it comes: what is wrong with it, and characters that were cut.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace bifocal {

// What begins at a byte: a character, or the longest start of one that has a wrong byte next.
struct Utf8Part {
  std::size_t bytes;  // at least 1
  char32_t code;      // of a whole character
  bool is_whole;
  bool is_cut;  // the text ends before the character does
};

// at < text.size().
Utf8Part utf8_part(std::string_view text, std::size_t at);

// The first byte that belongs to no character; nothing where the text is UTF-8.
std::optional<std::size_t> find_invalid_utf8(std::string_view text);

// Throws Error with that byte, and with `where` in brackets.
void require_utf8(std::string_view text, const char* where);

// Every part that is no whole character becomes one U+FFFD.
std::string replace_invalid_utf8(std::string_view bytes);

// Bytes at the end that further bytes could make a character: 0 to 3.
std::size_t cut_utf8_bytes(std::string_view bytes);

// Unicode's property White_Space.
bool is_white_space(char32_t code);

}  // namespace bifocal
