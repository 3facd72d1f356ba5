// `bifocal grade`: which of the sampled answers are right.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "cli/commands.h"
#include "core/error.h"
#include "core/log.h"
#include "evaluate/graded_file.h"
#include "evaluate/rollout_file.h"

namespace bifocal {

namespace {

struct GradeOptions {
  std::string problems;
  std::string rollouts;
  std::string output;
  std::string name;
  std::string group_by;
  std::string extraction = "auto";
  std::vector<std::string> graders;
  GraderOptions grader;
  bool partial = false;
};

void run_grade(GradeOptions options) {
  options.grader.extraction = extraction_of(options.extraction);
  std::vector<std::unique_ptr<Grader>> graders;
  graders.reserve(options.graders.size());
  for (const std::string& grader : options.graders) {
    graders.push_back(make_grader(grader, options.grader));
  }
  const ProblemSet problems = ProblemSet::read(options.problems);
  const nlohmann::json settings = rollout_settings(options.rollouts);
  const std::string hash = settings.is_object() ? settings.value("problems_sha256", "") : "";
  BIFOCAL_REQUIRE(hash.empty() || hash == problems.hash(),
                  "[grade] {} answers another problem file than {}: give the one it was made with",
                  options.rollouts,
                  options.problems);
  const std::string name =
      options.name.empty() ? std::filesystem::path(options.output).stem().string() : options.name;
  const GradedSet set = grade_rollouts(
      name, problems, read_rollouts(options.rollouts), graders, options.group_by, options.partial);
  write_graded(options.output, set);
  const auto answers = static_cast<std::int64_t>(set.samples.size());
  for (std::size_t g = 0; g < set.graders.size(); ++g) {
    const auto correct = std::ranges::count_if(
        set.samples, [&](const GradedSample& sample) { return sample.verdicts[g].correct; });
    fmt::print("{}: {} of {} answers are right by {} ({:.1f} %)\n",
               name,
               format_count(correct),
               format_count(answers),
               set.graders[g],
               100.0 * static_cast<double>(correct) / static_cast<double>(answers));
  }
}

}  // namespace

void add_grade_command(CLI::App& app, const CommandContext& context) {
  CLI::App* command = app.add_subcommand("grade", "Grade sampled answers, as JSON lines");
  const auto options = std::make_shared<GradeOptions>();
  command->add_option("--problems", options->problems, "JSON lines with id and answer")->required();
  command
      ->add_option(
          "--rollouts", options->rollouts, "Directory of `bifocal rollouts`, or its rollouts.jsonl")
      ->required();
  command
      ->add_option("--grader",
                   options->graders,
                   "exact, gsm8k-strict, gsm8k-flexible or register-machine; several: the first "
                   "gives the score, the others are compared with it")
      ->required();
  command->add_option("--output", options->output, "Graded JSON lines to write")->required();
  command->add_option(
      "--name", options->name, "What answered, for tables; default: the output's name");
  command->add_option("--group-by",
                      options->group_by,
                      "Field of the problems that groups them; default: group, where they have it");
  command
      ->add_option("--extract",
                   options->extraction,
                   "Where `exact` looks: boxed, hash (####), number, or auto, the first of these "
                   "that is there; of each the last")
      ->capture_default_str();
  command->add_option("--registers", options->grader.registers, "Of register-machine problems")
      ->capture_default_str();
  command->add_option("--max-steps", options->grader.max_steps, "Of register-machine problems")
      ->capture_default_str();
  command->add_flag(
      "--partial", options->partial, "Allow problems with fewer samples than others, or none");
  command->callback([options, &context] {
    require_one_rank(context, "grade");
    run_grade(*options);
  });
}

}  // namespace bifocal
