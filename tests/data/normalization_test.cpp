// Form C against Python's unicodedata (tests/data/tokenizers/make_tokenizers.py), utf8proc, and the
// tables of the `tokenizers` library.
#include "data/normalization.h"

#include <cstdlib>
#include <fstream>
#include <set>
#include <utf8proc.h>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "data/utf8.h"

namespace bifocal {
namespace {

std::string utf8_of(const std::vector<std::int32_t>& codes) {
  std::string text;
  for (const std::int32_t code : codes) {
    std::array<utf8proc_uint8_t, 4> bytes{};
    const auto size = utf8proc_encode_char(code, bytes.data());
    text.append(bytes.begin(), bytes.begin() + size);
  }
  return text;
}

std::string nfc_of(const std::string& text) {
  std::string storage;
  return std::string(nfc(text, storage));
}

TEST(Normalization, GivesWhatUnicodedataGives) {
  std::ifstream file(BIFOCAL_SOURCE_DIR "/tests/data/tokenizers/nfc.jsonl");
  int count = 0;
  for (std::string line; std::getline(file, line); ++count) {
    const auto json = nlohmann::json::parse(line);
    EXPECT_EQ(nfc_of(utf8_of(json["from"])), utf8_of(json["to"])) << line;
    // Among text that stays as it is.
    EXPECT_EQ(nfc_of("ab" + utf8_of(json["from"]) + "cd"),
              nfc_of("ab" + utf8_of(json["to"]) + "cd"));
  }
  EXPECT_GT(count, 700);
}

TEST(Normalization, HangulKeepsWhatIsNoFinalConsonant) {
  EXPECT_EQ(nfc_of("\u1100\u1161\u11a7"), "\uac00\u11a7");
  EXPECT_EQ(nfc_of("\u1100\u1161\u11a8\u11a8"), "\uac01\u11a8");
}

TEST(Normalization, NormalTextIsNotCopied) {
  for (const std::string text : {"", "abc", "\u00e9\u8a18\uac00 \u0416"}) {
    std::string storage;
    EXPECT_EQ(nfc(text, storage).data(), text.data());
  }
}

// Every code point that the quick test lets pass: itself in form C, of class 0, and never the
// second half of a composition.
TEST(Normalization, InertCodePointsAreInert) {
  std::set<std::int32_t> seconds;
  for (std::int32_t code = 1; code < 0x110000; ++code) {
    std::array<utf8proc_int32_t, 32> parts{};
    int boundary = 0;
    const auto count =
        utf8proc_decompose_char(code, parts.data(), parts.size(), UTF8PROC_DECOMPOSE, &boundary);
    seconds.insert(parts.begin() + 1, parts.begin() + std::max<std::ptrdiff_t>(count, 1));
  }
  int inert = 0;
  for (std::int32_t code = 1; code < 0x110000; ++code) {
    if (!is_inert_in_nfc(static_cast<char32_t>(code))) {
      continue;
    }
    ++inert;
    const std::string text = utf8_of({code});
    auto* normal = utf8proc_NFC(reinterpret_cast<const utf8proc_uint8_t*>(text.c_str()));
    EXPECT_EQ(reinterpret_cast<const char*>(normal), text) << code;
    std::free(normal);  // NOLINT(cppcoreguidelines-no-malloc): utf8proc's
    EXPECT_EQ(utf8proc_get_property(code)->combining_class, 0) << code;
    EXPECT_FALSE(seconds.contains(code)) << code;
  }
  EXPECT_GT(inert, 80'000);
}

// Unicode 13 and later order and compose these; the library does not.
TEST(Normalization, LaterMarksStayWhereTheyStand) {
  for (const std::string text : {"x\u0345\u0898",
                                 "x\u0345\u1abf\u0323",
                                 "\u0eba\u0e38",
                                 "x\u0898\u0301",
                                 "\U00011935\U00011930",
                                 "\U00011938"}) {
    EXPECT_EQ(nfc_of(text), text);
  }
  EXPECT_EQ(nfc_of("e\u0301\u0898e\u0301"), "\u00e9\u0898\u00e9");
}

TEST(Normalization, ManyMarksTakeNoQuadraticTime) {
  std::string text = "a";
  std::string first;
  std::string second;
  for (int i = 0; i < 200'000; ++i) {
    text += "\u0301\u0323";
    first += "\u0323";
    second += "\u0301";
  }
  EXPECT_EQ(nfc_of(text), "\u1ea1" + first.substr(2) + second);
}

TEST(Utf8, PartsThatAreNoCharactersBecomeOneMark) {
  const std::pair<std::string, std::string> cases[] = {
      {"", ""},
      {"a\x80z", "a\uFFFDz"},
      {"\xE2\x82", "\uFFFD"},
      {"\xE2\x82\xE2\x82\xAC", "\uFFFD\u20AC"},
      {"\xF0\x9F\x98z", "\uFFFDz"},
      {"\xC0\xAF", "\uFFFD\uFFFD"},
      {"\xED\xA0\x80", "\uFFFD\uFFFD\uFFFD"},
      {"\xF4\x90\x80\x80", "\uFFFD\uFFFD\uFFFD\uFFFD"},
      {"\xF0\x80\x80\x80", "\uFFFD\uFFFD\uFFFD\uFFFD"},
      {"abcdefgh\xFF", "abcdefgh\uFFFD"}};
  for (const auto& [bytes, text] : cases) {
    EXPECT_EQ(replace_invalid_utf8(bytes), text);
    EXPECT_EQ(find_invalid_utf8(bytes).has_value(), bytes != text);
  }
}

TEST(Utf8, CutCharactersAreCounted) {
  const std::string text = "a\u00e9\u20ac\U0001f600";
  const std::size_t cuts[] = {0, 0, 1, 0, 1, 2, 0, 1, 2, 3, 0};
  for (std::size_t size = 0; size <= text.size(); ++size) {
    EXPECT_EQ(cut_utf8_bytes(text.substr(0, size)), cuts[size]) << size;
  }
  EXPECT_EQ(cut_utf8_bytes("\xE2\xFF"), 0U);
  EXPECT_EQ(cut_utf8_bytes("\x80\x80"), 0U);
}

}  // namespace
}  // namespace bifocal
