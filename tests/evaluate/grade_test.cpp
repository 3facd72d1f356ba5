// Graders: known answers, the rules of lm-evaluation-harness as Python's re applies them, and how
// answers fail.
#include "evaluate/grade.h"

#include <fstream>

#include <gtest/gtest.h>

#include "core/error.h"
#include "evaluate/graded_file.h"
#include "support/error_of.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

EvaluationProblem problem_of(const std::string& answer) {
  return {.id = "p", .prompt = "?", .answer = answer};
}

Rollout answer_of(const std::string& text) {
  return {.id = "p", .text = text, .tokens = 3, .stopped = true};
}

bool is_right(const char* grader, const std::string& reference, const std::string& text) {
  return make_grader(grader)->grade(problem_of(reference), answer_of(text)).correct;
}

TEST(ExactGrader, KnownAnswers) {
  EXPECT_TRUE(is_right("exact", "72", R"(so it is \boxed{72}.)"));
  EXPECT_TRUE(is_right("exact", "072", "the answer is 72"));
  EXPECT_TRUE(is_right("exact", "Half of it.\n#### 1,200", "1200 in all"));
  EXPECT_TRUE(is_right("exact", R"(We find $\boxed{\frac{1}{2}}$.)", R"(\boxed{\dfrac12})"));
  EXPECT_FALSE(is_right("exact", "72", R"(72 or \boxed{73})"));
  EXPECT_FALSE(is_right("exact", "72", R"(\boxed{})"));
  EXPECT_FALSE(is_right("exact", "72", ""));
  EXPECT_FALSE(is_right("exact", "", ""));
  const auto grader = make_grader("exact", {.extraction = Extraction::number});
  EXPECT_FALSE(grader->grade(problem_of("72"), answer_of(R"(\boxed{72} in 3 steps)")).correct);
  EXPECT_EQ(grader->grade(problem_of("72"), answer_of("a 03")).extracted, "3");
  EXPECT_EQ(grader->grade(problem_of("72"), answer_of("a")).extracted, std::nullopt);
}

TEST(Gsm8kGraders, KnownAnswers) {
  const std::string reference = "He has 9*8=<<9*8=72>>72.\n#### 72";
  EXPECT_TRUE(is_right("gsm8k-strict", reference, "So 72.\n#### 72"));
  EXPECT_TRUE(is_right("gsm8k-strict", "#### 1234", "#### 1,234."));
  EXPECT_FALSE(is_right("gsm8k-strict", reference, "The answer is 72."));
  EXPECT_FALSE(is_right("gsm8k-strict", reference, "#### 71\n#### 72"));  // the first match counts
  EXPECT_TRUE(is_right("gsm8k-flexible", reference, "#### 71\n#### 72"));
  EXPECT_TRUE(is_right("gsm8k-flexible", reference, "It costs $72."));
  EXPECT_FALSE(is_right("gsm8k-flexible", reference, "72 of 100"));
  EXPECT_FALSE(is_right("gsm8k-flexible", reference, "72.0"));  // texts are compared, not values
  // The harness stops generating at the next question.
  EXPECT_TRUE(is_right("gsm8k-flexible", reference, "72\n\nQuestion: 5 apples?"));
  EXPECT_TRUE(is_right("gsm8k-flexible", reference, "72<|im_end|> 3"));
}

TEST(Gsm8kGraders, AgreeWithPythonsRegularExpressions) {
  std::ifstream file(BIFOCAL_SOURCE_DIR "/tests/evaluate/reference/gsm8k_cases.json");
  const nlohmann::json cases = nlohmann::json::parse(file);
  ASSERT_GE(cases.size(), 400U);
  for (const nlohmann::json& item : cases) {
    const auto text = item["text"].get<std::string>();
    const std::string strict = gsm8k_filter(text, Gsm8kFilter::strict_match);
    const std::string flexible = gsm8k_filter(text, Gsm8kFilter::flexible_extract);
    EXPECT_EQ(strict, item["strict"].get<std::string>()) << item["text"];
    EXPECT_EQ(flexible, item["flexible"].get<std::string>()) << item["text"];
    EXPECT_EQ(gsm8k_normalize(text), item["normalized"]) << item["text"];
    EXPECT_EQ(gsm8k_normalize(strict), item["normalized_strict"]) << item["text"];
    EXPECT_EQ(gsm8k_normalize(flexible), item["normalized_flexible"]) << item["text"];
  }
}

TEST(TextGraders, TellHowAnswersFail) {
  const auto grader = make_grader("exact");
  const auto fate = [&](const std::string& text) {
    return grader->final_answers(problem_of("72"), answer_of(text));
  };
  const FinalAnswers loop = fate(R"(\boxed{5} \boxed{05} \boxed{6} \boxed{5.0})");
  EXPECT_EQ(loop.repeats, 3);
  EXPECT_FALSE(loop.stated);
  EXPECT_FALSE(loop.anywhere);
  const FinalAnswers changed = fate(R"(\boxed{72} no, \boxed{5})");
  EXPECT_EQ(changed.repeats, 1);
  EXPECT_TRUE(changed.stated);
  const FinalAnswers passed = fate("72 came up, then \\boxed{5}");
  EXPECT_FALSE(passed.stated);
  EXPECT_TRUE(passed.anywhere);
  EXPECT_EQ(fate("nothing").repeats, 0);
}

class RegisterMachineGrading : public ::testing::Test {
 protected:
  RegisterVocabulary vocabulary_;
  RegisterProblem made_ = make_problem(vocabulary_, 7, 0, 3);
  EvaluationProblem problem_{.id = "p", .prompt_ids = made_.prompt};
  std::unique_ptr<Grader> grader_ = make_grader("register-machine");

  static Rollout with(const std::vector<std::int32_t>& ids) {
    return {.id = "p", .ids = ids, .tokens = static_cast<std::int64_t>(ids.size())};
  }
};

TEST_F(RegisterMachineGrading, KnownAnswers) {
  const Verdict right = grader_->grade(problem_, with(made_.answer));
  EXPECT_TRUE(right.correct);
  const std::vector<std::int32_t> last(made_.answer.end() - 19, made_.answer.end() - 2);
  EXPECT_EQ(right.extracted, vocabulary_.decode(last));  // a step has 17 tokens, then end <end>
  std::vector<std::int32_t> wrong = made_.answer;
  wrong[8] = vocabulary_.digit((wrong[8] + 1) % 10);
  EXPECT_FALSE(grader_->grade(problem_, with(wrong)).correct);
  EXPECT_FALSE(grader_->grade(problem_, with({})).correct);
  EXPECT_EQ(grader_->grade(problem_, with({})).extracted, std::nullopt);
}

TEST_F(RegisterMachineGrading, TellsHowAnswersFail) {
  std::vector<std::int32_t> loop = made_.answer;
  loop.resize(loop.size() - 2);
  const std::vector<std::int32_t> last(loop.end() - 17, loop.end());
  loop.insert(loop.end(), last.begin(), last.end());
  loop.insert(loop.end(), last.begin(), last.end() - 1);  // a last step that is not closed
  const FinalAnswers found = grader_->final_answers(problem_, with(loop));
  EXPECT_EQ(found.repeats, 2);
  EXPECT_TRUE(found.stated);
  EXPECT_TRUE(found.anywhere);
  const FinalAnswers none = grader_->final_answers(problem_, with({1, 2, 3}));
  EXPECT_EQ(none.repeats, 0);
  EXPECT_FALSE(none.stated || none.anywhere);
}

TEST(Graders, RefuseWhatTheyCannotRead) {
  EXPECT_THROW(make_grader("fuzzy"), Error);
  const auto exact = make_grader("exact");
  EXPECT_THROW(exact->grade({.id = "p", .prompt = "?"}, answer_of("1")), Error);
  EXPECT_THROW(exact->grade(problem_of("1"), {.id = "p", .ids = {1}}), Error);
  EXPECT_THROW(make_grader("register-machine")->grade(problem_of("1"), {.id = "p"}), Error);
}

class GradeFiles : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& text) {
    std::ofstream(directory_.path(name)) << text;
    return directory_.path(name);
  }

  template <class Work>
  static void expect_error(const Work& work, const std::string& part) {
    const std::string text = test::error_of(work);
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }

  test::TemporaryDirectory directory_;
  ProblemSet problems_ = ProblemSet::read(
      write("problems.jsonl",
            R"({"id": "a", "prompt": "1 + 1", "answer": 2, "group": "sums", "n": 1})"
            "\n"
            R"({"id": 7, "messages": [], "answer": "3", "group": "sums", "n": 2})"
            "\n"));
  std::vector<std::unique_ptr<Grader>> graders_ = [] {
    std::vector<std::unique_ptr<Grader>> graders;
    graders.push_back(make_grader("exact"));
    graders.push_back(make_grader("gsm8k-strict"));
    return graders;
  }();

  GradedSet grade(const std::vector<Rollout>& rollouts,
                  const std::string& group_by = "",
                  bool partial = false) {
    return grade_rollouts("m", problems_, rollouts, graders_, group_by, partial);
  }
};

TEST_F(GradeFiles, ReadBackEqual) {
  const GradedSet set = grade({{.id = "7", .sample = 0, .text = "3", .tokens = 4, .stopped = true},
                               {.id = "a", .sample = 0, .text = "\xff", .tokens = 9}});
  ASSERT_EQ(set.samples.size(), 2U);
  EXPECT_EQ(set.samples[0].id, "a");  // the problems' order
  write_graded(directory_.path("graded.jsonl"), set);
  const GradedSet read = read_graded(directory_.path("graded.jsonl"));
  EXPECT_EQ(read.name, "m");
  EXPECT_EQ(read.graders, (std::vector<std::string>{"exact", "gsm8k-strict"}));
  ASSERT_EQ(read.samples.size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    const GradedSample& a = set.samples[i];
    const GradedSample& b = read.samples[i];
    EXPECT_EQ(a.id, b.id);
    EXPECT_EQ(a.group, b.group);
    EXPECT_EQ(a.sample, b.sample);
    EXPECT_EQ(a.tokens, b.tokens);
    EXPECT_EQ(a.stopped, b.stopped);
    EXPECT_EQ(a.final_answers.repeats, b.final_answers.repeats);
    EXPECT_EQ(a.final_answers.stated, b.final_answers.stated);
    EXPECT_EQ(a.final_answers.anywhere, b.final_answers.anywhere);
    for (std::size_t g = 0; g < 2; ++g) {
      EXPECT_EQ(a.verdicts[g].correct, b.verdicts[g].correct);
      EXPECT_EQ(a.verdicts[g].extracted, b.verdicts[g].extracted);
    }
  }
  EXPECT_TRUE(read.samples[1].correct());
  EXPECT_FALSE(read.samples[1].verdicts[1].correct);
  EXPECT_EQ(read.samples[0].group, "sums");
}

TEST_F(GradeFiles, GroupByAnyField) {
  const std::vector<Rollout> both{{.id = "a", .text = ""}, {.id = "7", .text = ""}};
  EXPECT_EQ(grade(both, "n").samples[1].group, "2");
  expect_error([&] { grade(both, "steps"); }, "problem a has no field steps");
}

TEST_F(GradeFiles, RefuseWhatDoesNotFit) {
  expect_error([&] { grade({{.id = "b", .text = ""}}); }, "answer problem b, which");
  expect_error([&] { grade({{.id = "a", .text = ""}}); }, "problem 7 has 0 samples");
  EXPECT_EQ(grade({{.id = "a", .text = ""}}, "", true).samples.size(), 1U);
  graders_.push_back(make_grader("exact"));
  expect_error([&] { grade({{.id = "a", .text = ""}}); }, "exact is given twice");
  graders_.clear();
  expect_error([&] { grade({{.id = "a", .text = ""}}); }, "at least one grader");
}

TEST_F(GradeFiles, RefuseOtherFiles) {
  const auto refused = [&](const std::string& text, const std::string& part) {
    expect_error([&] { read_graded(write("other.jsonl", text)); }, part);
  };
  const std::string head =
      R"({"format":"bifocal graded","version":1,"name":"m","graders":["exact"]})"
      "\n";
  const std::string line =
      R"({"id":"a","sample":0,"tokens":1,"finish_reason":"stop","correct":true,"stated":false,)"
      R"("anywhere":false,"repeats":0,"graders":{"exact":{"correct":true,"extracted":"2"}}})"
      "\n";
  EXPECT_EQ(read_graded(write("other.jsonl", head + line)).samples.size(), 1U);
  refused("", "holds no graded sample");
  refused(line, "other.jsonl:1");
  refused(R"({"format":"bifocal graded","version":2,"name":"m","graders":["exact"]})", "version 2");
  refused(R"({"format":"bifocal graded","version":1,"name":"m","graders":[]})", "one grader");
  refused(head + line + line, "a second time sample 0 of problem a");
  refused(head + "{\"id\": 1}\n", "other.jsonl:2");
  std::string lie = line;
  lie.replace(lie.find("true"), 4, "false");
  refused(head + lie, "correct is not what exact says");
}

TEST_F(GradeFiles, ProblemsAreChecked) {
  const auto refused = [&](const std::string& text, const std::string& part) {
    expect_error([&] { ProblemSet::read(write("bad.jsonl", text)); }, part);
  };
  refused("", "holds no problem");
  refused("[]", "bad.jsonl:1");
  refused(R"({"prompt": "?"})", "with id, got none");
  refused(R"({"id": 1.5, "prompt": "?"})", "a text or a whole number");
  refused(R"({"id": "a"})", "got none");
  refused(R"({"id": "a", "prompt_ids": []})", "empty prompt");
  refused(R"({"id": "a", "prompt_ids": ["x"]})", "integer");
  refused(R"({"id": "a", "prompt": "?", "answer": [1]})", "should be a text or a number");
  refused("{\"id\": \"1\", \"prompt\": \"?\"}\n{\"id\": 1, \"prompt\": \"?\"}",
          "second problem has the id 1");
}

}  // namespace
}  // namespace bifocal
