// Which answer a text ends in, and which answers are the same.
#include "evaluate/answer_extraction.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/log.h"

namespace bifocal {
namespace {

using Texts = std::vector<std::string>;

Texts texts(const std::vector<std::string_view>& views) {
  return {views.begin(), views.end()};
}

std::string extract(std::string_view text, Extraction how = Extraction::automatic) {
  const auto answer = extract_answer(text, how);
  return answer ? std::string(*answer) : "(none)";
}

TEST(BoxedAnswers, ReadNestedBraces) {
  EXPECT_EQ(texts(boxed_answers(R"(so \boxed{5})")), Texts{"5"});
  EXPECT_EQ(texts(boxed_answers(R"(\boxed{\frac{1}{2}} and \fbox{ x^{2} })")),
            (Texts{R"(\frac{1}{2})", "x^{2}"}));
  EXPECT_EQ(texts(boxed_answers(R"(\boxed {7} \boxed
{8})")),
            (Texts{"7", "8"}));
  EXPECT_EQ(texts(boxed_answers(R"(\boxed{\boxed{3}})")), Texts{"3"});
  EXPECT_EQ(texts(boxed_answers(R"(\boxed{\text{\boxed{3}}} \boxed{4})")), (Texts{"3", "4"}));
  EXPECT_EQ(texts(boxed_answers(R"(\boxed{\{1,2\}})")), Texts{R"(\{1,2\})"});
  EXPECT_EQ(texts(boxed_answers(R"(\boxed{\left\{ 1 \right.})")), Texts{R"(\left\{ 1 \right.)"});
  EXPECT_EQ(texts(boxed_answers(R"(\boxed{})")), Texts{""});
}

TEST(BoxedAnswers, LeaveOutWhatIsNotClosed) {
  EXPECT_EQ(texts(boxed_answers(R"(\boxed{5} then \boxed{6)")), Texts{"5"});
  EXPECT_EQ(texts(boxed_answers(R"(\boxed{{5})")), Texts{});
  EXPECT_EQ(texts(boxed_answers(R"({ \boxed{5})")), Texts{"5"});
  EXPECT_EQ(texts(boxed_answers(R"(}}} \boxed{5}}})")), Texts{"5"});
  EXPECT_EQ(texts(boxed_answers(R"(\boxed)")), Texts{});
  EXPECT_EQ(texts(boxed_answers(R"(\boxed5 {6})")), Texts{});
  EXPECT_EQ(texts(boxed_answers(R"(\boxedx{5})")), Texts{});
  EXPECT_EQ(texts(boxed_answers(R"(boxed{5})")), Texts{});
  EXPECT_EQ(texts(boxed_answers("\\")), Texts{});
}

TEST(HashAnswers, AreTheRestOfALineWithADigit) {
  EXPECT_EQ(texts(hash_answers("#### 72")), Texts{"72"});
  EXPECT_EQ(texts(hash_answers("He has 5.\n#### $1,234.50 \n#### -3\r\n")),
            (Texts{"$1,234.50", "-3"}));
  EXPECT_EQ(texts(hash_answers("####72")), Texts{"72"});
  // Headings of Markdown are no answers.
  EXPECT_EQ(texts(hash_answers("#### Step 1\n##### 5\n### 4\n#### Answer\n#### ")), Texts{});
}

TEST(Numbers, KnowSignsCommasAndFractions) {
  EXPECT_EQ(texts(numbers("a 12, -3.5 and .25")), (Texts{"12", "-3.5", ".25"}));
  EXPECT_EQ(texts(numbers("1,234,567.89")), Texts{"1,234,567.89"});
  EXPECT_EQ(texts(numbers("(1,2) 1,2345 12,34")), (Texts{"1", "2", "1", "2345", "12", "34"}));
  EXPECT_EQ(texts(numbers("1,234, 5,")), (Texts{"1,234", "5"}));
  EXPECT_EQ(texts(numbers("10-5 x-2 (3)-4 = -6")), (Texts{"10", "5", "2", "3", "4", "-6"}));
  EXPECT_EQ(texts(numbers("\xe2\x88\x92"
                          "8")),
            Texts{"\xe2\x88\x92"
                  "8"});
  EXPECT_EQ(texts(numbers("1.2.3 5.")), (Texts{"1.2", "3", "5"}));
  EXPECT_EQ(texts(numbers("none - , . $")), Texts{});
}

TEST(ExtractAnswer, PrefersBoxesThenHashesThenNumbers) {
  EXPECT_EQ(extract("#### 4\n\\boxed{3} or \\boxed{5}, 7"), "5");
  EXPECT_EQ(extract("2\n#### 4\n 7"), "4");
  EXPECT_EQ(extract("from 2 to 7 apples"), "7");
  EXPECT_EQ(extract("no idea"), "(none)");
  EXPECT_EQ(extract(""), "(none)");
  const std::string all = "#### 4\n\\boxed{5}\n7";
  EXPECT_EQ(extract(all, Extraction::hash), "4");
  EXPECT_EQ(extract(all, Extraction::boxed), "5");
  EXPECT_EQ(extract(all, Extraction::number), "7");
  EXPECT_EQ(extract("7", Extraction::boxed), "(none)");
}

TEST(ExtractAnswer, NamesOfExtractions) {
  EXPECT_EQ(extraction_of("auto"), Extraction::automatic);
  EXPECT_EQ(extraction_of("number"), Extraction::number);
  EXPECT_THROW(extraction_of("regex"), Error);
}

TEST(FinalStatements, FallBackToPhrases) {
  EXPECT_EQ(texts(final_statements(R"(The answer is 4. \boxed{5} \boxed{5})")), (Texts{"5", "5"}));
  EXPECT_EQ(texts(final_statements("The answer is 4.\n#### 5")), Texts{"5"});
  EXPECT_EQ(texts(final_statements("The answer is 4. Final Answer: **-6**. answer is: $7")),
            (Texts{"4", "-6", "7"}));
  EXPECT_EQ(texts(final_statements("4 and 5")), Texts{});
}

TEST(CanonicalNumber, HasOneFormPerValue) {
  const auto canonical = [](std::string_view text) {
    return canonical_number(text).value_or("(none)");
  };
  EXPECT_EQ(canonical("007"), "7");
  EXPECT_EQ(canonical("+5"), "5");
  EXPECT_EQ(canonical("-0.0"), "0");
  EXPECT_EQ(canonical("1,234.50"), "1234.5");
  EXPECT_EQ(canonical(".5"), "0.5");
  EXPECT_EQ(canonical("5."), "5");
  EXPECT_EQ(canonical("-0,012.50"), "-12.5");
  EXPECT_EQ(canonical("100000000000000000000000001"), "100000000000000000000000001");
  for (const char* text : {"", ".", "-", "1,2", "1e5", "5a", "1.2.3", "--5", "1/2", ",123"}) {
    EXPECT_EQ(canonical(text), "(none)") << text;
  }
}

TEST(NormalizeAnswer, MakesEqualAnswersEqual) {
  const std::vector<std::vector<const char*>> classes = {
      {"72",
       " 72 ",
       "$72$",
       "072",
       "72.0",
       "72.",
       R"(\$72)",
       R"(\(72\))",
       "x = 72",
       R"(\text{72})",
       "+72",
       R"(72\%)",
       "72%",
       R"(72^\circ)",
       R"(72^{\circ})",
       "**72**",
       R"(\mathbf{ 72 })"},
      {"1234", "1,234", R"(1{,}234)", R"(1\,234)", "$1,234.00"},
      {"-5",
       "\xe2\x88\x92"
       "5",
       "- 5",
       "y=-5"},
      {"1/2", R"(\frac{1}{2})", R"(\dfrac{1}{2})", R"(\tfrac12)", R"(\frac 1 2)", "1 / 2"},
      {"-1/2", R"(-\frac{1}{2})", R"(\frac{-1}{2})"},
      {"(1,2)", R"(\left( 1, 2 \right))", R"(\left(1,\!2\right).)"},
      {"x+1", "x + 1", R"(\text{x} + 1)"},
      {"Monday", R"(\text{Monday})", R"(\textbf{\text{Monday}})", "Monday."},
      {R"(\leftarrow)", R"(\leftarrow )"},
      {"0", "-0", "0.0", "00"},
      {"", " ", "$", "."},
  };
  for (std::size_t a = 0; a < classes.size(); ++a) {
    for (const char* text : classes[a]) {
      EXPECT_EQ(normalize_answer(text), normalize_answer(classes[a][0])) << text;
      for (std::size_t b = 0; b < a; ++b) {
        EXPECT_NE(normalize_answer(text), normalize_answer(classes[b][0])) << text;
      }
    }
  }
  EXPECT_EQ(normalize_answer("1,234"), "1234");
  EXPECT_EQ(normalize_answer("(1,234)"), "(1,234)");
  EXPECT_NE(normalize_answer("72.5"), normalize_answer("725"));
  EXPECT_NE(normalize_answer("X"), normalize_answer("x"));
}

TEST(HoldsAnswer, FindsNumbersByValueAndTextWhole) {
  EXPECT_TRUE(holds_answer("first 1,234.0 then 9", "1234"));
  EXPECT_FALSE(holds_answer("first 12345", "1234"));
  EXPECT_FALSE(holds_answer("10-5", "-5"));
  EXPECT_TRUE(holds_answer(R"(it is \frac{1}{2} or so)", "1/2"));
  EXPECT_TRUE(holds_answer("it is x + 1 here", "x+1"));
  EXPECT_FALSE(holds_answer("it is 11/23", "1/2"));
  EXPECT_TRUE(holds_answer("On (Monday)!", "Monday"));
  EXPECT_FALSE(holds_answer("Mondays", "Monday"));
  EXPECT_FALSE(holds_answer("anything", ""));
}

// What a model that loops, or means harm, may write: much of it each, read in linear time.
TEST(Extraction, IsLinearInHostileTexts) {
  const auto repeat = [](std::string_view piece) {
    std::string text;
    while (text.size() < 300'000) {
      text += piece;
    }
    return text;
  };
  for (const char* piece :
       {R"(\boxed{)", "{",       "}",          R"(\text{)",  "#",    "#### ",
        "#### a",     "1,111,",  "1,",         "-",          ".",    "$",
        "answer is ", "answer:", " ",          R"(\frac{1)", R"(\)", R"(\boxed )",
        "9",          "\xff",    R"(\left\{)", "\n",         "1.1"}) {
    const std::string text = repeat(piece);
    const Stopwatch watch;
    (void)extract_answer(text, Extraction::automatic);
    (void)final_statements(text);
    (void)holds_answer(text, "5");
    (void)holds_answer(text, "1/2");
    (void)normalize_answer(text);
    EXPECT_LT(watch.seconds(), 10.0) << piece;  // far below what a quadratic search takes
  }
}

}  // namespace
}  // namespace bifocal
