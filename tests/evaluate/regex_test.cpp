// Searching with PCRE2: all matches, replacement, and patterns or texts that mean harm.
#include "evaluate/regex.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace bifocal {
namespace {

std::vector<std::string> all_of(const Regex& regex, std::string_view text) {
  std::vector<std::string> found;
  regex.for_each(text, [&](const RegexMatch& match) {
    found.emplace_back(match[0]);
    return true;
  });
  return found;
}

using Texts = std::vector<std::string>;

TEST(Regex, FindsMatchesFromLeftToRight) {
  EXPECT_EQ(all_of(Regex(R"(\d+)"), "a1b22c333"), (Texts{"1", "22", "333"}));
  EXPECT_EQ(all_of(Regex(R"(\d+)"), ""), Texts{});
  EXPECT_EQ(all_of(Regex("x*"), "axb"), (Texts{"", "x", "", ""}));  // as Perl and Python find them
  EXPECT_TRUE(Regex("^a$").matches("a\n"));
  EXPECT_FALSE(Regex("a.b").matches("a\nb"));
  EXPECT_EQ(all_of(Regex("\xc3."), "\xc3\xa9\xff"), (Texts{"\xc3\xa9"}));  // bytes, not UTF-8
}

TEST(Regex, StopsWhenTheVisitorHasEnough) {
  int calls = 0;
  Regex("a").for_each("aaa", [&](const RegexMatch&) { return ++calls < 2; });
  EXPECT_EQ(calls, 2);
}

TEST(Regex, GroupsThatTookNoPartHaveNoData) {
  Regex("(a)|(b)").for_each("b", [](const RegexMatch& match) {
    EXPECT_EQ(match.size(), 3U);
    EXPECT_EQ(match[1].data(), nullptr);
    EXPECT_EQ(match[2], "b");
    return true;
  });
}

TEST(Regex, Replaces) {
  EXPECT_EQ(Regex(",").replace("1,234,5", -1), "12345");
  EXPECT_EQ(Regex(R"(<(\w+)>)").replace("<a>-<bc>", 1), "a-bc");
  EXPECT_EQ(Regex("z").replace("abc", -1), "abc");
}

TEST(Regex, RefusesWhatIsNoPattern) {
  try {
    Regex("a(b");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("a(b"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("at byte 3"), std::string::npos) << error.what();
  }
}

// Every way to part 40 letters among two nested repetitions: 2^40 steps without a bound.
TEST(Regex, EndsACatastrophicSearchWithAnError) {
  const Regex regex("^(a+)+$");
  EXPECT_TRUE(regex.matches(std::string(40, 'a')));
  EXPECT_THROW(regex.matches(std::string(40, 'a') + "b"), Error);
}

TEST(Regex, ReadsLongTexts) {
  std::string text(4'000'000, 'a');
  EXPECT_FALSE(Regex("(?s).*b").matches(text));
  EXPECT_TRUE(Regex("a*$").matches(text));
  text += "b";
  EXPECT_EQ(Regex("(?s).*b").replace(text, -1), "");
}

}  // namespace
}  // namespace bifocal
