// rollouts, grade and compare from outside, with the register machine's models: a run that is
// killed and taken up again, refusals, and the way from problems to a plot.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/file.h"
#include "support/program.h"
#include "support/temporary_directory.h"

namespace bifocal::test {

namespace {

namespace fs = std::filesystem;

const std::string kMachine = std::string(BIFOCAL_SOURCE_DIR) + "/data/register-machine/";

// Starts the program, waits until the file has so many lines, and kills it as the kernel does.
void run_and_kill(const std::vector<std::string>& arguments,
                  const std::string& file,
                  std::int64_t lines) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::vector<char*> words{const_cast<char*>(BIFOCAL_BINARY)};
    for (const std::string& argument : arguments) {
      words.push_back(const_cast<char*>(argument.c_str()));
    }
    words.push_back(nullptr);
    const int null = ::open("/dev/null", O_WRONLY);
    ::dup2(null, 1);
    ::execv(BIFOCAL_BINARY, words.data());
    ::_exit(127);
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  const auto has_lines = [&] {
    if (!fs::exists(file)) {
      return false;
    }
    const std::string text = read_file(file);
    return std::ranges::count(text, '\n') >= lines;
  };
  while (!has_lines() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ::kill(child, SIGKILL);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status)) << "the run was over before it could be killed";
}

class EvaluationCommands : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return directory_.path(name); }

  void make_problems(int count, int steps) {
    const Outcome made =
        run_program("synth register-machine --count " + std::to_string(count) + " --steps " +
                    std::to_string(steps) + " --seed 5 --output " + path("some.jsonl"));
    ASSERT_EQ(made.exit_code, 0) << made.text;
    std::ofstream(path("problems.jsonl"), std::ios::app) << read_file(path("some.jsonl"));
  }

  // A command line of rollouts; `changed` replaces options.
  std::vector<std::string> words(const std::string& model,
                                 const std::string& run,
                                 const std::map<std::string, std::string>& changed = {}) const {
    std::map<std::string, std::string> options{{"--model", kMachine + model},
                                               {"--problems", path("problems.jsonl")},
                                               {"--output", path(run)},
                                               {"--samples", "4"},
                                               {"--temperature", "1.5"},
                                               {"--seed", "9"},
                                               {"--max-new-tokens", "300"},
                                               {"--batch", "3"}};
    for (const auto& [name, value] : changed) {
      options[name] = value;
    }
    std::vector<std::string> line{"rollouts"};
    for (const auto& [name, value] : options) {
      line.insert(line.end(), {name, value});
    }
    return line;
  }

  Outcome rollouts(const std::string& model,
                   const std::string& run,
                   const std::map<std::string, std::string>& changed = {}) {
    std::string line;
    for (const std::string& word : words(model, run, changed)) {
      line += word + " ";
    }
    return run_program(line);
  }

  Outcome grade(const std::string& run, const std::string& more = "") {
    return run_program("grade --problems " + path("problems.jsonl") + " --rollouts " + path(run) +
                       " --grader register-machine --group-by steps --output " +
                       path(run + ".jsonl") + " " + more);
  }

  static void expect_refusal(const Outcome& outcome, const std::string& part) {
    EXPECT_EQ(outcome.exit_code, 1) << outcome.text;
    EXPECT_NE(outcome.text.find(part), std::string::npos) << outcome.text;
  }

  TemporaryDirectory directory_;
};

TEST_F(EvaluationCommands, AKilledRunGoesOnAndGivesTheSameFile) {
  make_problems(6, 8);
  ASSERT_EQ(rollouts("bifocal", "whole").exit_code, 0);
  const std::string whole = read_file(path("whole/rollouts.jsonl"));
  EXPECT_EQ(std::ranges::count(whole, '\n'), 24);
  for (const std::int64_t lines : {1, 5}) {
    run_and_kill(words("bifocal", "killed"), path("killed/part-0000.jsonl"), lines);
  }
  EXPECT_FALSE(fs::exists(path("killed/rollouts.jsonl")));
  expect_refusal(grade("killed"), "is not finished");
  const Outcome last = rollouts("bifocal", "killed", {{"--batch", "7"}});
  EXPECT_EQ(last.exit_code, 0) << last.text;
  EXPECT_EQ(read_file(path("killed/rollouts.jsonl")), whole);
}

TEST_F(EvaluationCommands, RefuseOtherSettings) {
  make_problems(1, 1);
  ASSERT_EQ(rollouts("bifocal", "run").exit_code, 0);
  const std::string before = read_file(path("run/rollouts.jsonl"));
  expect_refusal(rollouts("bifocal", "run", {{"--seed", "1"}}),
                 "was made with seed 9, now it is 1");
  expect_refusal(rollouts("teacher", "run"), "was made with model_sha256");
  expect_refusal(rollouts("bifocal", "run", {{"--stop-id", "3"}}), "was made with stop_ids");
  make_problems(1, 2);
  expect_refusal(rollouts("bifocal", "run"), "was made with problems_sha256");
  expect_refusal(grade("run"), "answers another problem file");
  EXPECT_EQ(read_file(path("run/rollouts.jsonl")), before);
}

TEST_F(EvaluationCommands, ComparesTheStudentsByLength) {
  make_problems(3, 2);
  make_problems(2, 30);
  for (const char* model : {"swa_learned_sink", "bifocal"}) {
    // The limit cuts off all answers of 30 steps, of which the first 12 steps are then there.
    const Outcome drawn = rollouts(model, model, {{"--temperature", "0"}, {"--samples", "1"}});
    ASSERT_EQ(drawn.exit_code, 0) << drawn.text;
    const Outcome graded = grade(model);
    ASSERT_EQ(graded.exit_code, 0) << graded.text;
    EXPECT_NE(graded.text.find("3 of 5 answers are right by register-machine"), std::string::npos)
        << graded.text;
  }
  const std::string line = "compare " + path("swa_learned_sink.jsonl") + " " +
                           path("bifocal.jsonl") + " --long-tokens 100 --bins 50,100 --json " +
                           path("report.json") + " --markdown " + path("report.md") + " --plot " +
                           path("report.svg");
  const Outcome compared = run_program(line);
  ASSERT_EQ(compared.exit_code, 0) << compared.text;
  EXPECT_EQ(compared.text, read_file(path("report.md")));
  EXPECT_NE(compared.text.find("Warning: 40.0 % of the answers of bifocal were cut off"),
            std::string::npos)
      << compared.text;
  const auto report = nlohmann::json::parse(read_file(path("report.json")));
  for (const char* key : {"what", "command", "commit", "date", "machine", "notes", "rows"}) {
    EXPECT_TRUE(report.contains(key)) << key;
  }
  const nlohmann::json& entry = report["comparisons"][0];
  EXPECT_EQ(entry["all"]["rates"]["bifocal"]["value"], 0.6);
  EXPECT_EQ(entry["by_length"][1]["problems"], 2);
  EXPECT_EQ(entry["groups"][0]["name"], "2");
  EXPECT_EQ(entry["groups"][0]["rates"]["bifocal"]["value"], 1.0);
  EXPECT_EQ(entry["groups"][1]["rates"]["bifocal"]["value"], 0.0);
  EXPECT_TRUE(read_file(path("report.svg")).starts_with("<svg "));

  expect_refusal(run_program(line + " --append"), "has a row");
  EXPECT_EQ(nlohmann::json::parse(read_file(path("report.json"))), report);
  const Outcome more = run_program(line + " --append --name a --name b");
  EXPECT_EQ(more.exit_code, 0) << more.text;
  EXPECT_EQ(nlohmann::json::parse(read_file(path("report.json")))["comparisons"].size(), 2U);
  expect_refusal(run_program(line + " --name a"), "wanted a --name for each of the 2 sets");
  EXPECT_EQ(run_program("compare " + path("bifocal.jsonl")).exit_code, 2);
}

TEST_F(EvaluationCommands, PromptsOfWordsGetTheAnswersOfTheirIds) {
  make_problems(2, 3);
  ASSERT_EQ(rollouts("bifocal", "ids").exit_code, 0);
  std::string words;
  const std::string problems = read_file(path("problems.jsonl"));
  for (std::size_t begin = 0; begin < problems.size();) {
    const std::size_t end = problems.find('\n', begin);
    const auto line = nlohmann::json::parse(problems.substr(begin, end - begin));
    words += nlohmann::json{{"id", line["id"]}, {"prompt", line["prompt"]}}.dump() + "\n";
    begin = end + 1;
  }
  write_file_atomically(path("words.jsonl"), words);
  const Outcome drawn = rollouts("bifocal", "words", {{"--problems", path("words.jsonl")}});
  ASSERT_EQ(drawn.exit_code, 0) << drawn.text;
  const std::string want = read_file(path("ids/rollouts.jsonl"));
  EXPECT_EQ(read_file(path("words/rollouts.jsonl")), want);
  EXPECT_NE(want.find("\"answer\":\"step #1 "), std::string::npos) << want;
}

TEST_F(EvaluationCommands, NameWhatIsMissing) {
  make_problems(1, 1);
  ASSERT_EQ(rollouts("bifocal", "run").exit_code, 0);
  expect_refusal(grade("run", "--grader exact --extract words"), "got 'words'");
  expect_refusal(grade("run", "--grader best"), "register-machine, got best");
  expect_refusal(grade("none"), "cannot open");
  EXPECT_EQ(run_program("rollouts --model x").exit_code, 2);
  expect_refusal(rollouts("bifocal", "run", {{"--problems", path("none.jsonl")}}), "none.jsonl");
  expect_refusal(rollouts("bifocal", "same", {{"--temperature", "0"}}), "would all be the same");
}

}  // namespace

}  // namespace bifocal::test
