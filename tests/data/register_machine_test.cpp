// Register-machine problems: the shipped vocabulary and problems, the generator and the checker.
#include "data/register_machine.h"

#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/file.h"
#include "core/sha256.h"
#include "data/problem_file.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

const std::string kShipped = std::string(BIFOCAL_SOURCE_DIR) + "/data/register-machine";

TEST(RegisterMachine, WritesTheShippedTokenizer) {
  EXPECT_EQ(RegisterVocabulary().tokenizer_json(), read_file(kShipped + "/teacher/tokenizer.json"));
}

TEST(RegisterMachine, LargerVocabulariesKeepTheLayout) {
  const RegisterVocabulary vocabulary(26, 500);
  EXPECT_EQ(vocabulary.size() % 64, 0);
  EXPECT_EQ(vocabulary.word(vocabulary.reg(25)), "r25");
  EXPECT_EQ(vocabulary.word(vocabulary.index(500)), "#500");
  EXPECT_EQ(vocabulary.word(vocabulary.problem()), "<problem>");
  EXPECT_EQ(vocabulary.word(vocabulary.pad()), "<pad>");
  const RegisterProblem problem = make_problem(vocabulary, 1, 2, 500);
  EXPECT_TRUE(check_answer(vocabulary, problem.prompt, problem.answer).correct);
  EXPECT_EQ(vocabulary.encode(vocabulary.decode(problem.answer)), problem.answer);
}

TEST(RegisterMachine, ShippedProblemsAreSolvedAsShipped) {
  const RegisterVocabulary vocabulary;
  const auto problems = read_problems(vocabulary, kShipped + "/problems.jsonl");
  std::map<std::int64_t, int> counts;
  std::string answers;
  for (const RegisterProblem& problem : problems) {
    ++counts[problem.steps];
    ASSERT_TRUE(check_answer(vocabulary, problem.prompt, problem.answer).correct) << problem.id;
    for (std::size_t i = 0; i < problem.answer.size(); ++i) {
      answers += i == 0 ? "" : " ";
      answers += std::to_string(problem.answer[i]);
    }
    answers += "\n";
  }
  const std::map<std::int64_t, int> wanted = {
      {1, 200}, {2, 200}, {4, 200}, {8, 200}, {16, 200}, {24, 200}, {32, 200}, {40, 200}};
  EXPECT_EQ(counts, wanted);
  // Of the answers that the models' own training program wrote.
  EXPECT_EQ(sha256_hex(answers),
            "3475b9a7f125073252e57c4c442f6c567af3c0f45e5fd5e8cc538a4a889fd7b9");
}

TEST(RegisterMachine, SolvesAProblemWorkedByHand) {
  const RegisterVocabulary vocabulary(2, 3);
  const auto prompt =
      vocabulary.encode("<problem> r0 7 r1 2 program #1 add r0 5 #2 set r1 9 #3 add r1 9 answer");
  EXPECT_EQ(vocabulary.decode(solve(vocabulary, prompt)),
            "step #1 add r0 5 : 2 2 ; step #2 set r1 9 : 2 9 ; step #3 add r1 9 : 2 8 ; end <end>");
}

TEST(RegisterMachine, EveryChangedTokenIsCaughtAtItsPlace) {
  const RegisterVocabulary vocabulary;
  const RegisterProblem problem = make_problem(vocabulary, 9, 0, 3);
  for (std::size_t i = 0; i < problem.answer.size(); ++i) {
    std::vector<std::int32_t> answer = problem.answer;
    answer[i] = (answer[i] + 1) % 95;
    const AnswerCheck check = check_answer(vocabulary, problem.prompt, answer);
    EXPECT_FALSE(check.correct);
    EXPECT_EQ(check.first_wrong, static_cast<std::int64_t>(i));
    EXPECT_NE(check.reason.find("should be " + vocabulary.word(problem.answer[i])),
              std::string::npos);
  }
  std::vector<std::int32_t> answer = problem.answer;
  answer.pop_back();
  EXPECT_EQ(check_answer(vocabulary, problem.prompt, answer).reason, "ends after 52 of 53 tokens");
  answer.insert(answer.end(), {vocabulary.end_of_text(), 0});
  EXPECT_EQ(check_answer(vocabulary, problem.prompt, answer).reason, "1 tokens after <end>");
}

TEST(RegisterMachine, BrokenPromptsAreRefused) {
  const RegisterVocabulary vocabulary(2, 2);
  for (const char* text : {"<problem> r0 7 r1 2 program answer",
                           "<problem> r0 7 r0 2 program #1 add r0 5 answer",
                           "<problem> r0 7 r1 2 program #2 add r0 5 answer",
                           "<problem> r0 7 r1 2 program #1 add r0 5",
                           "<problem> r0 7 r1 2 program #1 add r0 5 answer step",
                           "<problem> r0 7 r1 2 program #1 : r0 5 answer",
                           ""}) {
    EXPECT_THROW(solve(vocabulary, vocabulary.encode(text)), Error) << text;
  }
  EXPECT_THROW(vocabulary.encode("r7"), Error);
}

TEST(RegisterMachine, ProblemsDependOnSeedNumberAndStepsAlone) {
  const RegisterVocabulary vocabulary;
  const RegisterProblem problem = make_problem(vocabulary, 1, 17, 5);
  EXPECT_EQ(problem.prompt, make_problem(vocabulary, 1, 17, 5).prompt);
  EXPECT_NE(problem.prompt, make_problem(vocabulary, 1, 18, 5).prompt);
  EXPECT_NE(problem.prompt, make_problem(vocabulary, 2, 17, 5).prompt);
  EXPECT_THROW(make_problem(vocabulary, 1, 0, 64), Error);
  EXPECT_THROW(make_problem(vocabulary, 1, 0, 0), Error);
}

TEST(RegisterMachine, DrawsStepsLogUniformly) {
  constexpr std::int64_t kDraws = 20000;
  std::map<std::int64_t, std::int64_t> counts;
  for (std::int64_t i = 0; i < kDraws; ++i) {
    ++counts[draw_steps(3, i, 2, 46)];
  }
  EXPECT_EQ(counts.begin()->first, 2);
  EXPECT_EQ(counts.rbegin()->first, 46);
  for (const std::int64_t n : {2, 5, 20, 46}) {
    const double share =
        std::log((static_cast<double>(n) + 1.0) / static_cast<double>(n)) / std::log(47.0 / 2.0);
    const double deviation = std::sqrt(static_cast<double>(kDraws) * share);
    EXPECT_NEAR(
        static_cast<double>(counts[n]), static_cast<double>(kDraws) * share, 4.0 * deviation);
  }
}

TEST(RegisterMachine, ChecksFilesOfAnswers) {
  const RegisterVocabulary vocabulary;
  const test::TemporaryDirectory directory;
  const std::string problems = directory.path("problems.jsonl");
  const std::string answers = directory.path("answers.jsonl");
  std::string problem_lines;
  for (int i = 0; i < 5; ++i) {
    problem_lines += problem_line(vocabulary, make_problem(vocabulary, 1, i, i < 3 ? 2 : 4)) + "\n";
  }
  write_file_atomically(problems, problem_lines);
  const std::string first = vocabulary.decode(make_problem(vocabulary, 1, 0, 2).answer);
  write_file_atomically(answers,
                        problem_line(vocabulary, make_problem(vocabulary, 1, 3, 4)) +
                            "\n{\"id\": \"2-0\", \"answer\": \"" + first +
                            "\"}\n{\"id\": \"2-1\", \"answer\": \"what is this\"}\n"
                            "{\"id\": \"4-4\", \"answer_ids\": [87, 1]}\n");
  const SolvedReport report = check_answers(vocabulary, problems, answers);
  ASSERT_EQ(report.by_steps.size(), 2U);
  EXPECT_EQ(report.by_steps[0].steps, 2);
  EXPECT_EQ(report.by_steps[0].problems, 3);
  EXPECT_EQ(report.by_steps[0].answered, 2);
  EXPECT_EQ(report.by_steps[0].solved, 1);
  EXPECT_EQ(report.by_steps[1].solved, 1);
  ASSERT_EQ(report.failures.size(), 3U);
  EXPECT_EQ(report.failures[1], "2-2: no answer");
  write_file_atomically(answers, "{\"id\": \"9-9\", \"answer\": \"end\"}\n");
  EXPECT_THROW(check_answers(vocabulary, problems, answers), Error);
}

TEST(RegisterMachine, AWrongAnswerInAProblemFileIsRefused) {
  const RegisterVocabulary vocabulary;
  const test::TemporaryDirectory directory;
  RegisterProblem problem = make_problem(vocabulary, 1, 0, 2);
  problem.answer[8] = (problem.answer[8] + 1) % 10;
  write_file_atomically(directory.path("p.jsonl"), problem_line(vocabulary, problem) + "\n");
  EXPECT_THROW(read_problems(vocabulary, directory.path("p.jsonl")), Error);
}

}  // namespace
}  // namespace bifocal
