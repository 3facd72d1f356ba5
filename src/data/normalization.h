// Unicode normalisation form C, as the `tokenizers` library computes it.
#pragma once

#include <string>
#include <string_view>

namespace bifocal {

// The text itself where it is in form C already, otherwise a view of `storage`. The text must be
// UTF-8. Time is linear in the text but for sorting combining marks.
// Marks that Unicode got after version 9, and the one composition of version 13 (U+11938), stay
// where they stand: the library's tables are that old, and ids must be those that a model saw.
std::string_view nfc(std::string_view text, std::string& storage);

// Whether a code point is its own form C and never joins or passes what stands before it. Says no
// for many code points of which it would be true.
bool is_inert_in_nfc(char32_t code);

}  // namespace bifocal
