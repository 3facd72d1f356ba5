// Patterns: their translation, what they cut, and what they may cost.
#include "data/split_pattern.h"

#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"

namespace bifocal {
namespace {

std::vector<std::string> cut(const char* pattern, std::string_view text, double seconds = 60.0) {
  const SplitPattern compiled(pattern);
  SplitBudget budget{std::chrono::duration<double>(seconds)};
  Splitter splitter(compiled, text, budget);
  std::vector<std::string> pieces;
  while (const std::optional<std::string_view> piece = splitter.next()) {
    pieces.emplace_back(*piece);
  }
  EXPECT_EQ(splitter.next(), std::nullopt);
  return pieces;
}

using Pieces = std::vector<std::string>;

TEST(SplitPattern, CutsIntoMatchesAndWhatStandsBetween) {
  EXPECT_EQ(cut("[ab]+", "xxabbyaz"), (Pieces{"xx", "abb", "y", "a", "z"}));
  EXPECT_EQ(cut("a", ""), Pieces{});
  EXPECT_EQ(cut("a", "xyz"), Pieces{"xyz"});
  EXPECT_EQ(cut("a*", "baac"), (Pieces{"b", "aa", "c"}));
  EXPECT_EQ(cut("(?=b)", "abab"), (Pieces{"a", "ba", "b"}));
  EXPECT_EQ(cut("(?<=\u00e9)", "\u00e9\u00e9"), (Pieces{"\u00e9", "\u00e9"}));
  EXPECT_EQ(cut("^a|b$", "aab\nab"), (Pieces{"a", "a", "b", "\n", "a", "b"}));
  EXPECT_EQ(cut("a.c", "abca\nc"), (Pieces{"abc", "a\nc"}));
}

// The matches lie beyond one window of the search, and no window cuts a character.
TEST(SplitPattern, FindsDistantMatches) {
  for (std::size_t count = 335; count < 350; ++count) {
    std::string text;
    for (std::size_t i = 0; i < 3 * count; ++i) {
      text += "\u8a18";
    }
    EXPECT_EQ(cut("[0-9]", text + "7" + text), (Pieces{text, "7", text}));
  }
}

TEST(SplitPattern, IsTranslatedWhereLibrariesDiffer) {
  EXPECT_EQ(to_pcre2("(a|b){2,3}?(?i:\\p{^L}\\P{^N})"), "(?:a|b){2,3}?(?i:\\P{L}\\p{N})");
  EXPECT_EQ(to_pcre2("\\u00e9\\x{1F600}\\x41\\v\\-{x}"), "\\x{00e9}\\x{1F600}\\x{41}\\x0B\\-\\{x}");
  EXPECT_EQ(cut("\\s", "a\u180eb\u0085c\u3000d\u200be"),
            (Pieces{"a\u180eb", "\u0085", "c", "\u3000", "d\u200be"}));
  EXPECT_EQ(cut("\\S+", "a\u180e\u0085c"), (Pieces{"a\u180e", "\u0085", "c"}));
  EXPECT_EQ(cut("[\\Sx]+", "a\u180e\u0085c"), (Pieces{"a\u180e", "\u0085", "c"}));
  EXPECT_EQ(cut("[^\\s]+", "a\u180e\u0085c"), (Pieces{"a\u180e", "\u0085", "c"}));
  EXPECT_EQ(cut("\\v", "\x0B\n"), (Pieces{"\x0B", "\n"}));
}

TEST(SplitPattern, OtherConstructsAreNamed) {
  const std::pair<const char*, const char*> refused[] = {
      {"\\w", "\\w"},           {"[\\W]", "\\W"},     {"\\b", "\\b"},
      {"\\h", "\\h"},           {"(a)\\1", "\\1"},    {"\\R", "\\R"},
      {"\\X", "\\X"},           {"\\A", "\\A"},       {"\\Ka", "\\K"},
      {"\\p{Han}", "\\p{Han}"}, {"\\pL", "\\p"},      {"(?i:\\p{Lu})", "\\p{Lu}"},
      {"[[:alpha:]]", "["},     {"[a&&b]", "&&"},     {"[]a]", "[]"},
      {"[a", "[ without ]"},    {"(?m:a)", "(?m:"},   {"(?i)a", "(?i)"},
      {"(?<n>a)", "(?<n"},      {"(*UTF)a", "(*"},    {"a{2}+", "{2}+"},
      {"a{2}?", "{2}?"},        {"a{,2}", "{,2}"},    {"\\xE9", "\\xE9"},
      {"a\\", "ends with"},     {"(a", "is wrong"},   {"a)", "is wrong"},
      {"*a", "is wrong"},       {"[b-a]", "is wrong"}};
  for (const auto& [pattern, named] : refused) {
    try {
      const SplitPattern compiled(pattern);
      ADD_FAILURE() << pattern << " was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(named), std::string::npos) << error.what();
    }
  }
  EXPECT_THROW(SplitPattern(std::string(1 << 17, 'a')), Error);
  EXPECT_THROW(SplitPattern("((((a{999}){999}){999}){999})"), Error);
}

// Exponential: stopped by the count of steps. Quadratic: by the clock.
TEST(SplitPattern, HostilePatternsAreStopped) {
  EXPECT_THROW(cut("(?:a+)+b|(?:a|a)+c", std::string(5000, 'a')), Error);
  EXPECT_THROW(cut("(?:a|b|ab)*[cd]", std::string(200'000, 'a'), 0.2), Error);
  EXPECT_THROW(cut("a*[bc]", std::string(500'000, 'a'), 0.2), Error);
}

}  // namespace
}  // namespace bifocal
