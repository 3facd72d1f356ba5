// `bifocal synth`: makes synthetic problems and checks answers to them.
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "cli/commands.h"
#include "core/error.h"
#include "core/file.h"
#include "data/problem_file.h"
#include "data/register_machine.h"

namespace bifocal {

namespace {

constexpr std::int64_t kShippedSteps = 63;  // that the shipped models' vocabulary numbers

// Options that fix the vocabulary. Shorter programs keep the shipped one.
struct MachineOptions {
  std::int64_t registers = 10;
  std::int64_t max_steps = kShippedSteps;

  void add_to(CLI::App& command, const std::string& help) {
    command.add_option("--registers", registers, "Registers of the machine")->capture_default_str();
    command.add_option("--max-steps", max_steps, help)->capture_default_str();
  }

  RegisterVocabulary vocabulary() const {
    return RegisterVocabulary(registers, std::max(max_steps, kShippedSteps));
  }
};

struct MakeOptions {
  MachineOptions machine;
  std::int64_t count = 0;
  std::int64_t steps = 0;  // 0: drawn
  std::int64_t min_steps = 1;
  std::uint64_t seed = 0;
  std::string output;
  std::string tokenizer;
};

struct CheckOptions {
  MachineOptions machine;
  std::string problems;
  std::string answers;
  std::int64_t failures = 5;
};

void make_problems(const MakeOptions& options) {
  const RegisterVocabulary vocabulary = options.machine.vocabulary();
  std::ofstream file(options.output);
  BIFOCAL_REQUIRE(
      file.good(), "[synth] cannot write {}: check the path of --output", options.output);
  std::int64_t tokens = 0;
  for (std::int64_t number = 0; number < options.count; ++number) {
    const std::int64_t steps =
        options.steps > 0
            ? options.steps
            : draw_steps(options.seed, number, options.min_steps, options.machine.max_steps);
    const RegisterProblem problem = make_problem(vocabulary, options.seed, number, steps);
    tokens += static_cast<std::int64_t>(problem.prompt.size() + problem.answer.size());
    file << problem_line(vocabulary, problem) << '\n';
  }
  file.close();
  BIFOCAL_REQUIRE(file.good(), "[synth] writing {} failed: is the disk full?", options.output);
  if (!options.tokenizer.empty()) {
    write_file_atomically(options.tokenizer, vocabulary.tokenizer_json());
  }
  fmt::print("{} problems, {} tokens, vocabulary {}: {}\n",
             options.count,
             tokens,
             vocabulary.size(),
             options.output);
}

void check_problems(const CheckOptions& options) {
  const SolvedReport report =
      check_answers(options.machine.vocabulary(), options.problems, options.answers);
  fmt::print("{:>6} {:>9} {:>9} {:>8} {:>7}\n", "steps", "problems", "answered", "solved", "rate");
  for (const SolvedRate& rate : report.by_steps) {
    fmt::print("{:>6} {:>9} {:>9} {:>8} {:>6.1f}%\n",
               rate.steps,
               rate.problems,
               rate.answered,
               rate.solved,
               100.0 * static_cast<double>(rate.solved) / static_cast<double>(rate.problems));
  }
  const auto shown =
      std::min<std::size_t>(report.failures.size(), static_cast<std::size_t>(options.failures));
  for (std::size_t i = 0; i < shown; ++i) {
    fmt::print("{}\n", report.failures[i]);
  }
  if (shown < report.failures.size()) {
    fmt::print("and {} more that failed (--failures shows more)\n", report.failures.size() - shown);
  }
}

void add_register_machine(CLI::App& synth, const CommandContext& context) {
  CLI::App* command = synth.add_subcommand(
      "register-machine",
      "Make problems: numbered programs over registers of one digit, as JSON lines of token ids "
      "and words");
  auto options = std::make_shared<MakeOptions>();
  options->machine.add_to(*command,
                          "Step counts are drawn up to here; above 63 the vocabulary grows");
  command->add_option("--count", options->count, "Problems to make")
      ->required()
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40));
  CLI::Option* steps =
      command->add_option("--steps", options->steps, "Steps of every program; default: drawn")
          ->check(CLI::PositiveNumber);
  command
      ->add_option("--min-steps",
                   options->min_steps,
                   "Step counts are drawn log-uniformly from here to --max-steps")
      ->excludes(steps)
      ->capture_default_str();
  command->add_option("--seed", options->seed, "Seed")->capture_default_str();
  command->add_option("--output", options->output, "JSON-lines file to write")->required();
  command->add_option("--tokenizer", options->tokenizer, "tokenizer.json to write beside it");
  command->callback([options, &context] {
    require_one_rank(context, "synth");
    make_problems(*options);
  });
}

void add_check(CLI::App& synth, const CommandContext& context) {
  CLI::App* command =
      synth.add_subcommand("check", "Check answers to register-machine problems, by step count");
  auto options = std::make_shared<CheckOptions>();
  options->machine.add_to(*command, "As when the problems were made");
  command->add_option("--problems", options->problems, "Problems: id and prompt_ids a line")
      ->required();
  command
      ->add_option(
          "--answers", options->answers, "Answers: id and answer_ids or answer (words) a line")
      ->required();
  command->add_option("--failures", options->failures, "How many wrong answers to explain")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->callback([options, &context] {
    require_one_rank(context, "synth");
    check_problems(*options);
  });
}

}  // namespace

void add_synth_command(CLI::App& app, const CommandContext& context) {
  CLI::App* synth = app.add_subcommand("synth", "Make synthetic problems and check answers");
  synth->require_subcommand(1);
  add_register_machine(*synth, context);
  add_check(*synth, context);
}

}  // namespace bifocal
