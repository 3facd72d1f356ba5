// Checks of UTF-8 text.
#include "core/utf8.h"

#include <cstdint>
#include <cstring>
#include <utf8proc.h>

namespace bifocal {

std::size_t valid_utf8_bytes(std::string_view text) {
  constexpr std::uint64_t kHighBits = 0x8080808080808080U;
  std::size_t at = 0;
  while (at < text.size()) {
    std::uint64_t word = 0;
    if (text.size() - at >= sizeof word) {
      std::memcpy(&word, text.data() + at, sizeof word);
      if ((word & kHighBits) == 0) {  // eight ASCII characters
        at += sizeof word;
        continue;
      }
    }
    utf8proc_int32_t character = 0;
    const utf8proc_ssize_t bytes =
        utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data() + at),
                         static_cast<utf8proc_ssize_t>(text.size() - at),
                         &character);
    if (bytes <= 0) {
      break;
    }
    at += static_cast<std::size_t>(bytes);
  }
  return at;
}

std::string_view cut_utf8(std::string_view text, std::size_t limit) {
  const std::string_view cut = text.substr(0, limit);
  return cut.size() == text.size() ? text : cut.substr(0, valid_utf8_bytes(cut));
}

}  // namespace bifocal
