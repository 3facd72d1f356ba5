// UTF-8 by the table of well-formed byte sequences.
#include "data/utf8.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/error.h"

namespace bifocal {

namespace {

struct Lead {
  std::size_t bytes;  // of the character; 0: no lead byte
  std::uint8_t low;   // range of the second byte
  std::uint8_t high;
};

// Surrogates, overlong forms and what lies above U+10FFFF show in the second byte.
Lead lead_of(std::uint8_t byte) {
  if (byte >= 0xC2 && byte <= 0xDF) {
    return {2, 0x80, 0xBF};
  }
  if (byte >= 0xE0 && byte <= 0xEF) {
    return {3,
            static_cast<std::uint8_t>(byte == 0xE0 ? 0xA0 : 0x80),
            static_cast<std::uint8_t>(byte == 0xED ? 0x9F : 0xBF)};
  }
  if (byte >= 0xF0 && byte <= 0xF4) {
    return {4,
            static_cast<std::uint8_t>(byte == 0xF0 ? 0x90 : 0x80),
            static_cast<std::uint8_t>(byte == 0xF4 ? 0x8F : 0xBF)};
  }
  return {0, 0, 0};
}

// Where the ASCII characters that begin at `at` end, or a little before.
std::size_t skip_ascii(std::string_view text, std::size_t at) {
  constexpr std::uint64_t kHigh = 0x8080808080808080U;
  for (; at + sizeof(std::uint64_t) <= text.size(); at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + at, sizeof(word));
    if ((word & kHigh) != 0) {
      break;
    }
  }
  return at;
}

}  // namespace

Utf8Part utf8_part(std::string_view text, std::size_t at) {
  const auto first = static_cast<std::uint8_t>(text[at]);
  if (first < 0x80) {
    return {1, first, true, false};
  }
  const Lead lead = lead_of(first);
  if (lead.bytes == 0) {
    return {1, 0, false, false};
  }
  char32_t code = first & (0x7FU >> lead.bytes);
  for (std::size_t i = 1; i < lead.bytes; ++i) {
    if (at + i == text.size()) {
      return {i, 0, false, true};
    }
    const auto byte = static_cast<std::uint8_t>(text[at + i]);
    if (byte < (i == 1 ? lead.low : 0x80) || byte > (i == 1 ? lead.high : 0xBF)) {
      return {i, 0, false, false};
    }
    code = (code << 6U) | (byte & 0x3FU);
  }
  return {lead.bytes, code, true, false};
}

std::optional<std::size_t> find_invalid_utf8(std::string_view text) {
  for (std::size_t at = skip_ascii(text, 0); at < text.size();) {
    const Utf8Part part = utf8_part(text, at);
    if (!part.is_whole) {
      return at;
    }
    at += part.bytes;
    if (part.bytes == 1) {
      at = skip_ascii(text, at);
    }
  }
  return std::nullopt;
}

void require_utf8(std::string_view text, const char* where) {
  const std::optional<std::size_t> invalid = find_invalid_utf8(text);
  BIFOCAL_REQUIRE(!invalid,
                  "[{}] the text is not UTF-8: byte {} (0x{:02X}) of {} begins no character; "
                  "convert the text first",
                  where,
                  *invalid,
                  static_cast<std::uint8_t>(text[*invalid]),
                  text.size());
}

std::string replace_invalid_utf8(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size());
  for (std::size_t at = 0; at < bytes.size();) {
    const std::size_t ascii = skip_ascii(bytes, at);
    text += bytes.substr(at, ascii - at);
    at = ascii;
    if (at < bytes.size()) {
      const Utf8Part part = utf8_part(bytes, at);
      text += part.is_whole ? bytes.substr(at, part.bytes) : std::string_view("\xEF\xBF\xBD");
      at += part.bytes;
    }
  }
  return text;
}

std::size_t cut_utf8_bytes(std::string_view bytes) {
  for (std::size_t back = 1; back <= std::min<std::size_t>(3, bytes.size()); ++back) {
    const Utf8Part part = utf8_part(bytes, bytes.size() - back);
    if (part.is_cut && part.bytes == back) {
      return back;
    }
  }
  return 0;
}

bool is_white_space(char32_t code) {
  return (code >= 0x09 && code <= 0x0D) || code == 0x20 || code == 0x85 || code == 0xA0 ||
         code == 0x1680 || (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 ||
         code == 0x202F || code == 0x205F || code == 0x3000;
}

}  // namespace bifocal
