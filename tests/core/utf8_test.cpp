// Checks of UTF-8 text.
#include "core/utf8.h"

#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace bifocal {
namespace {

TEST(Utf8, FindsTheFirstByteThatIsNone) {
  const std::string ascii(37, 'a');
  const std::vector<std::pair<std::string, std::size_t>> cases = {
      {"", 0},
      {"\xc3\xa9", 2},
      {"\xe2\x82\xac", 3},
      {"\xf0\x9f\x98\x80", 4},
      {"\xf4\x8f\xbf\xbf", 4},
      {"\xc3", 0},              // cut off
      {"x\xe2\x82", 1},         // cut off
      {"\x80", 0},              // a byte that continues nothing
      {"\xc0\xaf", 0},          // overlong
      {"\xe0\x80\xaf", 0},      // overlong
      {"\xed\xa0\x80", 0},      // a surrogate
      {"\xf4\x90\x80\x80", 0},  // above U+10FFFF
      {"\xff", 0},
      {std::string("\0a", 2), 2},
  };
  for (const auto& [text, valid] : cases) {
    for (const std::size_t before : {0U, 1U, 7U, 8U, 16U, 37U}) {
      const std::string whole = ascii.substr(0, before) + text;
      EXPECT_EQ(valid_utf8_bytes(whole), before + valid) << before << " before " << text;
      if (valid == text.size()) {
        EXPECT_EQ(valid_utf8_bytes(whole + ascii), whole.size() + ascii.size());
      }
    }
  }
}

TEST(Utf8, AcceptsEachCodePointButSurrogates) {
  for (std::uint32_t point = 0x800; point < 0x110000; point += 7) {
    std::string text;
    if (point < 0x10000) {
      text = {static_cast<char>(0xE0U | point >> 12U),
              static_cast<char>(0x80U | (point >> 6U & 0x3FU)),
              static_cast<char>(0x80U | (point & 0x3FU))};
    } else {
      text = {static_cast<char>(0xF0U | point >> 18U),
              static_cast<char>(0x80U | (point >> 12U & 0x3FU)),
              static_cast<char>(0x80U | (point >> 6U & 0x3FU)),
              static_cast<char>(0x80U | (point & 0x3FU))};
    }
    const bool is_surrogate = point >= 0xD800 && point < 0xE000;
    ASSERT_EQ(valid_utf8_bytes(text), is_surrogate ? 0 : text.size()) << point;
  }
}

TEST(Utf8, CutsBetweenCharacters) {
  EXPECT_EQ(cut_utf8("abc", 3), "abc");
  EXPECT_EQ(cut_utf8("abc", 2), "ab");
  EXPECT_EQ(cut_utf8("a\xe2\x82\xac"
                     "b",
                     3),
            "a");
  EXPECT_EQ(cut_utf8("a\xe2\x82\xac"
                     "b",
                     4),
            "a\xe2\x82\xac");
}

}  // namespace
}  // namespace bifocal
