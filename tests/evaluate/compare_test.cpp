// Every number of a comparison on a set small enough to work out by hand, and its refusals.
#include "evaluate/compare.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/file.h"
#include "evaluate/compare_report.h"
#include "support/error_of.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

struct Spec {
  const char* id;
  const char* group;
  std::int64_t tokens;
  bool stopped;
  bool correct;
  bool second;  // what the second grader says
  std::int64_t repeats = 1;
  bool stated = false;
  bool anywhere = false;
};

GradedSet make_set(const std::string& name, const std::vector<Spec>& specs) {
  GradedSet set{.name = name, .graders = {"exact", "gsm8k-flexible"}};
  std::map<std::string, std::int64_t> counts;
  for (const Spec& spec : specs) {
    set.samples.push_back(
        {.id = spec.id,
         .group = spec.group,
         .sample = counts[spec.id]++,
         .tokens = spec.tokens,
         .stopped = spec.stopped,
         .verdicts = {{.correct = spec.correct}, {.correct = spec.second}},
         .final_answers = {
             .repeats = spec.repeats, .stated = spec.stated, .anywhere = spec.anywhere}});
  }
  return set;
}

// Three problems of two samples. Typical lengths: a: median(10, 20, 30, 40) = 25; b: (100, 100,
// 120, 500) = 110; c: (90, 200, 200, 300) = 200. Long is over 100: b and c.
const std::vector<Spec> kFirst = {
    {"a", "10", 10, true, true, true, 1, true, true},
    {"a", "10", 20, true, false, false},
    {"b", "9", 100, true, false, true, 2},
    {"b", "9", 500, false, false, false, 5, true, true},  // cut off, right but not last
    {"c", "9", 90, true, true, false, 1, true, true},
    {"c", "9", 300, false, false, false, 0, false, true},  // cut off, right in passing
};
const std::vector<Spec> kSecond = {
    {"a", "10", 30, true, true, true, 1, true, true},
    {"a", "10", 40, true, true, true, 1, true, true},
    {"b", "9", 100, true, false, false},
    {"b", "9", 120, true, true, true, 1, true, true},
    {"c", "9", 200, true, true, true, 1, true, true},
    {"c", "9", 200, true, true, true, 2, true, true},
};

Comparison compare_both() {
  return compare_sets({make_set("first", kFirst), make_set("second", kSecond)},
                      {.long_tokens = 100, .bin_edges = {50, 150}, .resamples = 500});
}

TEST(Compare, RatesOfGroups) {
  const Comparison c = compare_both();
  EXPECT_EQ(c.least_samples, 2);
  EXPECT_EQ(c.most_samples, 2);
  EXPECT_EQ(c.all.problems, 3);
  EXPECT_EQ(c.all.typical_tokens, 110.0);
  EXPECT_DOUBLE_EQ(c.all.rates[0].value, (0.5 + 0.0 + 0.5) / 3.0);
  EXPECT_DOUBLE_EQ(c.all.rates[1].value, (1.0 + 0.5 + 1.0) / 3.0);
  EXPECT_DOUBLE_EQ(c.all.differences[0].value, 0.5);
  // Each problem gains exactly a half: no resample differs.
  EXPECT_DOUBLE_EQ(c.all.differences[0].interval.low, 0.5);
  EXPECT_DOUBLE_EQ(c.all.differences[0].interval.high, 0.5);
  // Of 500 draws of 3 from {0.5, 0, 0.5} more than 2.5 % are all zero (1 in 27), all halves (8 in
  // 27).
  EXPECT_EQ(c.all.rates[0].interval.low, 0.0);
  EXPECT_EQ(c.all.rates[0].interval.high, 0.5);
  ASSERT_EQ(c.by_length.size(), 2U);
  EXPECT_EQ(c.by_length[0].name, "short");
  EXPECT_EQ(c.by_length[0].problems, 1);
  EXPECT_EQ(c.by_length[0].rates[0].value, 0.5);
  EXPECT_EQ(c.by_length[0].rates[1].value, 1.0);
  EXPECT_EQ(c.by_length[1].name, "long");
  EXPECT_EQ(c.by_length[1].problems, 2);
  EXPECT_EQ(c.by_length[1].typical_tokens, 155.0);
  EXPECT_EQ(c.by_length[1].rates[0].value, 0.25);
  EXPECT_EQ(c.by_length[1].rates[1].value, 0.75);
  ASSERT_EQ(c.bins.size(), 3U);
  EXPECT_EQ(c.bins[0].name, "1-50");
  EXPECT_EQ(c.bins[1].name, "51-150");
  EXPECT_EQ(c.bins[2].name, "151-");
  EXPECT_EQ(c.bins[1].typical_tokens, 110.0);
  EXPECT_EQ(c.bins[1].rates[1].value, 0.5);
  ASSERT_EQ(c.groups.size(), 2U);
  EXPECT_EQ(c.groups[0].name, "9");  // in numeric order
  EXPECT_EQ(c.groups[0].problems, 2);
  EXPECT_EQ(c.groups[1].name, "10");
}

TEST(Compare, AnswersAndFailures) {
  const Comparison c = compare_both();
  const SetSummary& first = c.sets[0];
  EXPECT_EQ(first.problems, 3);
  EXPECT_EQ(first.answers, 6);
  EXPECT_EQ(first.correct, 2);
  EXPECT_EQ(first.long_answers, 2);
  EXPECT_EQ(first.correct_long, 0);
  EXPECT_EQ(first.median_tokens, 95.0);
  EXPECT_EQ(first.cut_off, 2);
  EXPECT_EQ(first.repeating, 2);
  EXPECT_EQ(first.cut_repeating, 1);
  EXPECT_DOUBLE_EQ(first.credit_stated, 1.0 / 6.0);
  EXPECT_DOUBLE_EQ(first.credit_anywhere, 2.0 / 6.0);
  ASSERT_EQ(first.agreements.size(), 1U);
  EXPECT_EQ(first.agreements[0].answers, 4);
  EXPECT_EQ(first.agreements[0].problems, 1);  // a; b has one more, c one fewer
  const SetSummary& second = c.sets[1];
  EXPECT_EQ(second.correct, 5);
  EXPECT_EQ(second.long_answers, 3);
  EXPECT_EQ(second.correct_long, 3);
  EXPECT_EQ(second.cut_off, 0);
  EXPECT_EQ(second.credit_anywhere, 0.0);
  EXPECT_EQ(second.agreements[0].answers, 6);
  EXPECT_EQ(second.agreements[0].problems, 3);
  ASSERT_EQ(c.warnings.size(), 1U);
  EXPECT_NE(c.warnings[0].find("33.3 % of the answers of first were cut off"), std::string::npos);
}

TEST(Compare, WarnsOverFivePercentAndNotAtFive) {
  std::vector<Spec> specs(20, {"a", "", 1, true, true, true});
  specs[0].stopped = false;
  const GradedSet other = make_set("other", {20, {"a", "", 1, true, true, true}});
  EXPECT_TRUE(compare_sets({make_set("cut", specs), other}, {}).warnings.empty());
  specs.pop_back();
  EXPECT_EQ(compare_sets({make_set("cut", specs), other}, {.resamples = 1}).warnings.size(), 2U);
}

TEST(Compare, PowersOfTwoPartTheBinsByDefault) {
  const GradedSet set = make_set("x",
                                 {{"a", "", 1, true, true, true},
                                  {"b", "", 2, true, true, true},
                                  {"c", "", 3, true, true, true},
                                  {"d", "", 64, true, true, true},
                                  {"e", "", 65, true, true, true}});
  GradedSet same = set;
  same.name = "y";
  const Comparison c = compare_sets({set, same}, {.resamples = 10});
  std::vector<std::string> names;
  for (const GroupComparison& bin : c.bins) {
    names.push_back(bin.name);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"1-1", "2-2", "3-4", "33-64", "65-128"}));
  EXPECT_EQ(c.by_length.size(), 1U);  // none is long
}

TEST(Compare, ThreeSetsAreComparedWithTheFirst) {
  const Comparison c = compare_sets(
      {make_set("first", kFirst), make_set("second", kSecond), make_set("third", kFirst)},
      {.resamples = 50});
  ASSERT_EQ(c.all.differences.size(), 2U);
  EXPECT_EQ(c.all.differences[1].value, 0.0);
  EXPECT_EQ(c.all.differences[1].interval.high, 0.0);
}

TEST(Compare, RefusesSetsThatDoNotFit) {
  const auto refused = [](const std::vector<GradedSet>& sets,
                          const CompareOptions& options,
                          const std::string& part) {
    const std::string text = test::error_of([&] { compare_sets(sets, options); });
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  const GradedSet first = make_set("first", kFirst);
  const GradedSet second = make_set("second", kSecond);
  refused({first}, {}, "at least two sets");
  refused({first, first}, {}, "two sets are named first");
  GradedSet other = second;
  other.graders = {"gsm8k-flexible", "exact"};
  refused({first, other}, {}, "grade them alike");
  other = second;
  other.samples[0].group = "12";
  refused({first, other}, {}, "in the groups '10' and '12'");
  other = make_set("other", {kSecond.begin(), kSecond.begin() + 2});
  other.samples.push_back({.id = "z", .tokens = 1, .verdicts = {{true}, {true}}});
  refused({first, other}, {}, "3 problems are not in all of the 2 sets: b, c, z");
  refused({first, second}, {.bin_edges = {5, 5}}, "ascending");
  refused({first, second}, {.bin_edges = {0, 5}}, "positive");
  refused({first, second}, {.resamples = 0}, "at least 1 resample");
  const Comparison common = compare_sets({first, other}, {.resamples = 5, .common_only = true});
  EXPECT_EQ(common.all.problems, 1);
  EXPECT_EQ(common.sets[0].answers, 2);
  EXPECT_EQ(common.left_out, (std::vector<std::string>{"b", "c", "z"}));
  other.samples.erase(other.samples.begin(), other.samples.begin() + 2);
  refused({first, other}, {.common_only = true}, "no problem is in all sets");
}

const ReportOrigin kOrigin{.what = "Tiny",
                           .command = "bifocal compare",
                           .commit = "abc",
                           .date = "2026-12-01",
                           .machine = "1 core",
                           .notes = "Made up."};

TEST(CompareReport, MarkdownShowsTheNumbers) {
  const std::string text = comparison_markdown(compare_both(), kOrigin);
  for (const char* part :
       {"## Tiny\n",
        "`bifocal compare`",
        "Commit abc, 2026-12-01, 1 core. Made up.",
        "| problems | number | typical tokens | first | second | second - first |",
        "| all | 3 | 110 | 33.3 % (0.0 to 50.0) | 83.3 % (50.0 to 100.0) | +50.0 (+50.0 to +50.0) "
        "|",
        "| short (up to 100 tokens) | 1 | 25 |",
        "| long (over 100 tokens) | 2 | 155 | 25.0 %",
        "| 51-150 | 1 | 110 |",
        "| 10 | 1 | 25 |",
        "| correct over 100 tokens | 0 | 3 |",
        "| cut off at the limit | 2 (33.3 %) | 0 (0.0 %) |",
        "| repeat a final answer | 2 (33.3 %) | 1 (16.7 %) |",
        "| points if cut-off answers that state the right answer counted | +16.7 | +0.0 |",
        "| graded alike by gsm8k-flexible | 4 of 6; 1 of 3 problems | 6 of 6; 3 of 3 problems |",
        "Warning: 33.3 % of the answers of first were cut off"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

TEST(CompareReport, JsonHasOneRowPerNumber) {
  const nlohmann::ordered_json report = comparison_json(compare_both(), kOrigin);
  EXPECT_EQ(report["commit"], "abc");
  std::map<std::string, nlohmann::ordered_json> rows;
  for (const auto& row : report["rows"]) {
    EXPECT_TRUE(rows.emplace(row["name"], row).second) << row["name"];
  }
  EXPECT_EQ(rows.at("pass1_first_long")["ours"], 0.25);
  EXPECT_EQ(rows.at("pass1_first_long")["samples"], 4);
  EXPECT_EQ(rows.at("solved_second_9")["ours"], 0.75);
  EXPECT_EQ(rows.at("solved_second_9")["unit"], "share");
  EXPECT_EQ(rows.at("gain_second")["low"], 0.5);
  EXPECT_EQ(rows.at("correct_long_second")["ours"], 3.0);
  EXPECT_DOUBLE_EQ(rows.at("cut_off_first")["ours"], 1.0 / 3.0);
  EXPECT_FALSE(rows.contains("gain_first"));
  EXPECT_EQ(report["comparisons"][0]["bins"].size(), 3U);
  EXPECT_EQ(report["comparisons"][0]["sets"][0]["agreements"][0]["problems"], 1);
}

TEST(CompareReport, SameSeedSameBytes) {
  EXPECT_EQ(comparison_json(compare_both(), kOrigin).dump(),
            comparison_json(compare_both(), kOrigin).dump());
  EXPECT_EQ(comparison_markdown(compare_both(), kOrigin),
            comparison_markdown(compare_both(), kOrigin));
}

TEST(CompareReport, AppendsToAReportAndRefusesDoubledRows) {
  const test::TemporaryDirectory directory;
  const nlohmann::ordered_json report = comparison_json(compare_both(), kOrigin);
  write_file_atomically(directory.path("report.json"), report.dump());
  EXPECT_THROW(append_report(directory.path("report.json"), report), Error);
  const Comparison other =
      compare_sets({make_set("third", kFirst), make_set("fourth", kSecond)}, {.resamples = 5});
  const nlohmann::ordered_json more = comparison_json(other, kOrigin);
  const nlohmann::ordered_json both = append_report(directory.path("report.json"), more);
  EXPECT_EQ(both["rows"].size(), report["rows"].size() + more["rows"].size());
  EXPECT_EQ(both["comparisons"].size(), 2U);
  write_file_atomically(directory.path("report.json"), "{}");
  EXPECT_THROW(append_report(directory.path("report.json"), more), Error);
}

}  // namespace
}  // namespace bifocal
