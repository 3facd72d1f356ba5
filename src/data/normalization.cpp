// Form C by utf8proc's tables; only what is not surely normal already is touched.
#include "data/normalization.h"

#include <algorithm>
#include <array>
#include <utf8proc.h>
#include <utility>
#include <vector>

#include "core/error.h"
#include "data/utf8.h"

namespace bifocal {

namespace {

struct Range {
  char32_t first;
  char32_t last;
};

// Letters, symbols and ideographs of common scripts: what most texts consist of. And U+11A7, which
// utf8proc drops behind a Hangul syllable, as if it were a final consonant.
constexpr Range kInert[] = {{0x0000, 0x02FF},
                            {0x0400, 0x0482},
                            {0x048A, 0x0559},
                            {0x05D0, 0x05EA},
                            {0x11A7, 0x11A7},
                            {0x2010, 0x2027},
                            {0x2030, 0x205E},
                            {0x2190, 0x2328},
                            {0x2500, 0x26FF},
                            {0x3000, 0x3029},
                            {0x3041, 0x3096},
                            {0x30A0, 0x30FF},
                            {0x3400, 0x9FFF},
                            {0xAC00, 0xD7A3},
                            {0xFF01, 0xFFDC},
                            {0x1F300, 0x1FAFF},
                            {0x20000, 0x2A6DF}};

// Not known to the library's tables; see the header.
constexpr Range kLater[] = {
    {0x07FD, 0x07FD},   {0x0898, 0x089F},   {0x08CA, 0x08D3},   {0x09FE, 0x09FE},
    {0x0C3C, 0x0C3C},   {0x0D3B, 0x0D3C},   {0x0EBA, 0x0EBA},   {0x1715, 0x1715},
    {0x1ABF, 0x1ACE},   {0x1DF6, 0x1DFA},   {0xA82C, 0xA82C},   {0x10D24, 0x10D27},
    {0x10EAB, 0x10EAC}, {0x10EFD, 0x10EFF}, {0x10F46, 0x10F50}, {0x10F82, 0x10F85},
    {0x11070, 0x11070}, {0x1133B, 0x1133B}, {0x1145E, 0x1145E}, {0x11839, 0x1183A},
    {0x11930, 0x11930}, {0x11935, 0x11935}, {0x11938, 0x11938}, {0x1193D, 0x1193E},
    {0x11943, 0x11943}, {0x119E0, 0x119E0}, {0x11A34, 0x11A34}, {0x11A47, 0x11A47},
    {0x11A99, 0x11A99}, {0x11D42, 0x11D42}, {0x11D44, 0x11D45}, {0x11D97, 0x11D97},
    {0x11F41, 0x11F42}, {0x16FF0, 0x16FF1}, {0x1E08F, 0x1E08F}, {0x1E130, 0x1E136},
    {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF}};

template <std::size_t N>
bool holds(const Range (&ranges)[N], char32_t code) {
  const auto* range = std::ranges::lower_bound(ranges, code, {}, &Range::last);
  return range != std::end(ranges) && range->first <= code;
}

constexpr auto kOptions = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);

std::uint16_t combining_class(utf8proc_int32_t code) {
  return utf8proc_get_property(code)->combining_class;
}

// Appends the decomposition of one code point.
void decompose(char32_t code, std::vector<utf8proc_int32_t>& codes) {
  std::array<utf8proc_int32_t, 32> parts{};
  int last_boundary = 0;
  const utf8proc_ssize_t count = utf8proc_decompose_char(
      static_cast<utf8proc_int32_t>(code), parts.data(), parts.size(), kOptions, &last_boundary);
  BIFOCAL_ASSERT(count >= 0 && std::cmp_less_equal(count, parts.size()));
  codes.insert(codes.end(), parts.begin(), parts.begin() + count);
}

// utf8proc's own ordering takes quadratic time for long runs of marks.
void order_marks(std::vector<utf8proc_int32_t>& codes) {
  for (auto begin = codes.begin(); begin != codes.end();) {
    const auto end =
        std::find_if(begin, codes.end(), [](auto code) { return combining_class(code) == 0; });
    std::stable_sort(begin, end, [](auto left, auto right) {
      return combining_class(left) < combining_class(right);
    });
    begin = end == codes.end() ? end : end + 1;
  }
}

void append_composed(std::vector<utf8proc_int32_t>& codes, std::string& out) {
  if (codes.empty()) {
    return;
  }
  order_marks(codes);
  const utf8proc_ssize_t count =
      utf8proc_normalize_utf32(codes.data(), static_cast<utf8proc_ssize_t>(codes.size()), kOptions);
  BIFOCAL_ASSERT(count >= 0);
  for (utf8proc_ssize_t i = 0; i < count; ++i) {
    std::array<utf8proc_uint8_t, 4> bytes{};
    const utf8proc_ssize_t size =
        utf8proc_encode_char(codes[static_cast<std::size_t>(i)], bytes.data());
    out.append(bytes.begin(), bytes.begin() + size);
  }
  codes.clear();
}

void append_nfc(std::string_view segment, std::string& out) {
  std::vector<utf8proc_int32_t> codes;
  for (std::size_t at = 0; at < segment.size();) {
    const Utf8Part part = utf8_part(segment, at);
    if (holds(kLater, part.code)) {
      append_composed(codes, out);
      out += segment.substr(at, part.bytes);
    } else {
      decompose(part.code, codes);
    }
    at += part.bytes;
  }
  append_composed(codes, out);
}

}  // namespace

bool is_inert_in_nfc(char32_t code) {
  return holds(kInert, code);
}

std::string_view nfc(std::string_view text, std::string& storage) {
  storage.clear();
  std::size_t copied = 0;    // bytes of the text that storage covers
  std::size_t previous = 0;  // the character before `at`
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Part part = utf8_part(text, at);
    if (is_inert_in_nfc(part.code)) {
      previous = at;
      at += part.bytes;
      continue;
    }
    // From the inert character before up to the next one: nothing outside can join.
    std::size_t end = at;
    while (end < text.size()) {
      const Utf8Part next = utf8_part(text, end);
      if (is_inert_in_nfc(next.code)) {
        break;
      }
      end += next.bytes;
    }
    storage += text.substr(copied, previous - copied);
    append_nfc(text.substr(previous, end - previous), storage);
    copied = previous = at = end;
  }
  if (copied == 0) {
    return text;
  }
  storage += text.substr(copied);
  return storage;
}

}  // namespace bifocal
