// The program from outside: help, version, usage errors, configuration errors and their exit codes.
#include <array>
#include <cstdio>
#include <string>
#include <sys/wait.h>

#include <gtest/gtest.h>

#include "config/options.h"

namespace bifocal {
namespace {

struct Outcome {
  int exit_code = -1;
  std::string text;  // stdout and stderr
};

Outcome run_program(const std::string& arguments) {
  const std::string line = std::string("\"") + BIFOCAL_BINARY + "\" " + arguments + " 2>&1";
  std::FILE* pipe = popen(line.c_str(), "r");
  EXPECT_NE(pipe, nullptr);
  Outcome outcome;
  std::array<char, 4096> buffer{};
  for (std::size_t count = 1; count > 0;) {
    count = std::fread(buffer.data(), 1, buffer.size(), pipe);
    outcome.text.append(buffer.data(), count);
  }
  const int status = pclose(pipe);
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return outcome;
}

bool contains(const Outcome& outcome, const std::string& part) {
  return outcome.text.find(part) != std::string::npos;
}

TEST(Commands, HelpListsTheCommandsAndExitsWithZero) {
  const Outcome outcome = run_program("--help");
  EXPECT_EQ(outcome.exit_code, 0);
  for (const char* command : {"synth",
                              "tokenize",
                              "pretrain",
                              "train",
                              "rows",
                              "evaluate",
                              "rollouts",
                              "grade",
                              "compare",
                              "export",
                              "memory",
                              "inspect",
                              "config"}) {
    EXPECT_TRUE(contains(outcome, command)) << command << "\n" << outcome.text;
  }
}

TEST(Commands, HelpOfACommandListsEveryOptionWithItsDefault) {
  const Outcome outcome = run_program("config --help");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_TRUE(contains(outcome, "40960")) << outcome.text;
  for (const OptionSection& section : option_sections()) {
    for (const Option& option : section.options) {
      EXPECT_TRUE(contains(outcome, "--" + option.key)) << option.key;
      EXPECT_TRUE(contains(outcome, option.help)) << option.key;
    }
  }
}

TEST(Commands, VersionNamesCommitBuildAndLibraries) {
  const Outcome outcome = run_program("--version");
  EXPECT_EQ(outcome.exit_code, 0);
  for (const char* part :
       {"bifocal ", "march", "CUDA", "MPI", "HDF5", "BLAS", "OpenSSL", "toml++"}) {
    EXPECT_TRUE(contains(outcome, part)) << part << "\n" << outcome.text;
  }
}

TEST(Commands, UsageErrorsExitWithTwo) {
  EXPECT_EQ(run_program("").exit_code, 2);
  EXPECT_EQ(run_program("no-such-command").exit_code, 2);
  EXPECT_EQ(run_program("config --align.steps").exit_code, 2);
  EXPECT_EQ(run_program("config --align.steps 1 --align.steps 2").exit_code, 2);
}

TEST(Commands, AnUnknownOptionNamesTheNearestOne) {
  const Outcome outcome = run_program("config --data.row_token 5");
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_TRUE(contains(outcome, "did you mean --data.row_tokens?")) << outcome.text;
}

TEST(Commands, AWrongValueIsAnErrorThatNamesTheKey) {
  const Outcome outcome = run_program("config --align.steps=-5");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(contains(outcome,
                       "bifocal: error: [config] align.steps: wanted an integer of at "
                       "least 0 (steps), got -5 (command line)"))
      << outcome.text;
}

TEST(Commands, ConfigPrintsTheResolvedConfiguration) {
  const Outcome outcome = run_program(
      "config --config \"" BIFOCAL_SOURCE_DIR
      "/configs/tiny/bifocal.toml\" "
      "--student.output_bias -2 --data.train a --data.train 'b c' --evaluate.reach true");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.text;
  EXPECT_TRUE(contains(outcome, "budget = 144\n")) << outcome.text;
  EXPECT_TRUE(contains(outcome, "output_bias = -2.0\n")) << outcome.text;
  EXPECT_TRUE(contains(outcome, "train = [\"a\", \"b c\"]\n")) << outcome.text;
  EXPECT_TRUE(contains(outcome, "reach = true\n")) << outcome.text;
}

}  // namespace
}  // namespace bifocal
