// Checks of UTF-8 text.
#pragma once

#include <cstddef>
#include <string_view>

namespace bifocal {

// Bytes of the longest beginning of the text that is UTF-8 (no overlong forms, no surrogates, no
// code points above U+10FFFF, no character cut off); text.size() where all of it is.
std::size_t valid_utf8_bytes(std::string_view text);

// The first characters of a UTF-8 text that fit `limit` bytes.
std::string_view cut_utf8(std::string_view text, std::size_t limit);

}  // namespace bifocal
