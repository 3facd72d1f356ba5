// The program from outside: help, version, usage errors, configuration errors and their exit codes.
#include <string>

#include <gtest/gtest.h>

#include "config/options.h"
#include "support/program.h"

namespace bifocal {
namespace {

using test::Outcome;
using test::run_program;

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
                              "merge",
                              "memory",
                              "inspect",
                              "bench",
                              "status",
                              "report",
                              "config"}) {
    EXPECT_TRUE(outcome.says(command)) << command << "\n" << outcome.text;
  }
}

TEST(Commands, HelpOfACommandListsEveryOptionWithItsDefault) {
  const Outcome outcome = run_program("config --help");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_TRUE(outcome.says("40960")) << outcome.text;
  for (const OptionSection& section : option_sections()) {
    for (const Option& option : section.options) {
      EXPECT_TRUE(outcome.says("--" + option.key)) << option.key;
      EXPECT_TRUE(outcome.says(option.help)) << option.key;
    }
  }
}

TEST(Commands, VersionNamesCommitBuildAndLibraries) {
  const Outcome outcome = run_program("--version");
  EXPECT_EQ(outcome.exit_code, 0);
  for (const char* part :
       {"bifocal ", "march", "CUDA", "MPI", "HDF5", "BLAS", "OpenSSL", "toml++"}) {
    EXPECT_TRUE(outcome.says(part)) << part << "\n" << outcome.text;
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
  EXPECT_TRUE(outcome.says("did you mean --data.row_tokens?")) << outcome.text;
}

TEST(Commands, AWrongValueIsAnErrorThatNamesTheKey) {
  const Outcome outcome = run_program("config --align.steps=-5");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(
      outcome.says("bifocal: error: [config] align.steps: wanted an integer of at "
                   "least 0 (steps), got -5 (command line)"))
      << outcome.text;
}

TEST(Commands, ConfigPrintsTheResolvedConfiguration) {
  const Outcome outcome = run_program(
      "config --config \"" BIFOCAL_SOURCE_DIR
      "/configs/tiny/bifocal.toml\" "
      "--student.output_bias -2 --data.train a --data.train 'b c' --evaluate.reach true");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.text;
  EXPECT_TRUE(outcome.says("budget = 144\n")) << outcome.text;
  EXPECT_TRUE(outcome.says("output_bias = -2.0\n")) << outcome.text;
  EXPECT_TRUE(outcome.says("train = [\"a\", \"b c\"]\n")) << outcome.text;
  EXPECT_TRUE(outcome.says("reach = true\n")) << outcome.text;
}

}  // namespace
}  // namespace bifocal
