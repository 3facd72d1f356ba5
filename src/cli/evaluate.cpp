// `bifocal evaluate`: a student beside its teacher on held-out rows.
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/config_options.h"
#include "cli/session.h"
#include "core/file.h"
#include "core/log.h"
#include "evaluate/divergence_json.h"
#include "hf/hf_config.h"

namespace bifocal {

namespace {

struct EvaluateOptions {
  std::string student;
  std::string json;
  std::int64_t reach_replacements = 4;
};

std::string table_line(const std::string& name, const DivergenceSums& sums) {
  return fmt::format("{:>13} {:>9} {:>9.5f} {:>8.2f} % {:>12.4f} {:>12.4f}",
                     name,
                     format_count(static_cast<std::int64_t>(sums.tokens)),
                     sums.mean_kl(),
                     100.0 * sums.agreement(),
                     sums.student_perplexity(),
                     sums.teacher_perplexity());
}

void evaluate(const RunConfig& config,
              const EvaluateOptions& options,
              const CommandContext& command) {
  BIFOCAL_REQUIRE(
      !config.teacher.path.empty(),
      "[evaluate] wanted a teacher, got none: set teacher.path to a Hugging Face directory");
  Session session(config, watched_world(command, config));
  const std::unique_ptr<Communicator> world = session.take_world();
  const std::unique_ptr<Communicator> node = world->split_node();
  const ModelConfig teacher_config = read_hf_config(config.teacher.path);
  const Context context = session.context();
  const ModelPlacement frozen{Weights::Placement::sharded, Region::teacher_weights, true};
  LoadedModel teacher =
      load_model(context, teacher_config, config.teacher.path, *node, frozen, config);
  LoadedModel student = open_student(context, config, options.student, *node, frozen);
  const RowSource source = open_rows(config, teacher_config, Split::held_out);
  const EvaluationRows rows = [&](std::int64_t index) { return source.row(index); };
  const std::int64_t count = source.rows_without_repeats(config.evaluate.rows);

  Console console(world->rank() == 0);
  Evaluator evaluator(context, *world, resolved_logit_chunk(config));
  const Divergence divergence =
      evaluator.divergence(student.decoder(), teacher.decoder(), rows, count);
  const std::string name =
      options.student.empty() ? "untrained " + config.student.preset : options.student;
  console.print(fmt::format("{} against {}, {} held-out rows of {} tokens",
                            name,
                            config.teacher.path,
                            count,
                            format_count(config.data.row_tokens)));
  console.print("     position    tokens  mean KL    top-1     perplexity      teacher");
  nlohmann::ordered_json report{
      {"student", name}, {"teacher", config.teacher.path}, {"rows", count}};
  report["row_tokens"] = config.data.row_tokens;
  report["all"] = to_json(divergence.all());
  report["by_position"] = by_position_json(divergence);
  for (std::size_t bucket = 0; bucket < divergence.by_position.size(); ++bucket) {
    const DivergenceSums& sums = divergence.by_position[bucket];
    if (sums.tokens == 0.0) {
      continue;
    }
    console.print(table_line(position_name(bucket), sums));
  }
  console.print(table_line("all", divergence.all()));
  if (config.evaluate.reach) {
    const auto seed = static_cast<std::uint64_t>(config.run.seed);
    const auto reach_of = [&](LoadedModel& model) {
      return evaluator.reach(model.decoder(), rows, count, options.reach_replacements, seed);
    };
    const auto of_student = reach_of(student);
    const auto of_teacher = reach_of(teacher);
    console.print("\nreach: mean KL at t when the token at t - D is replaced");
    console.print("            D   samples      student      teacher");
    report["reach"] = nlohmann::ordered_json::array();
    for (std::size_t k = 0; k < of_student.size(); ++k) {
      console.print(fmt::format("{:>13} {:>9} {:>12.6f} {:>12.6f}",
                                of_student[k].distance,
                                of_student[k].samples,
                                of_student[k].mean_kl,
                                of_teacher[k].mean_kl));
      report["reach"].push_back({{"distance", of_student[k].distance},
                                 {"samples", of_student[k].samples},
                                 {"student_kl", of_student[k].mean_kl},
                                 {"teacher_kl", of_teacher[k].mean_kl}});
    }
  }
  if (!options.json.empty() && world->rank() == 0) {
    write_file_atomically(options.json, report.dump(2) + "\n");
  }
}

}  // namespace

void add_evaluate_command(CLI::App& app, const CommandContext& context) {
  CLI::App* command = app.add_subcommand(
      "evaluate",
      "KL to the teacher, top-1 agreement and perplexity on held-out rows, by position; "
      "--evaluate.reach true adds how far the model looks back");
  const std::shared_ptr<ConfigOptions> config = ConfigOptions::add_to(*command);
  const auto options = std::make_shared<EvaluateOptions>();
  command->add_option(
      "--student",
      options->student,
      "Student: a Hugging Face directory, a run directory or a checkpoint; none: the teacher "
      "under student.preset, untrained");
  command->add_option("--json", options->json, "Write the report here too");
  command
      ->add_option("--reach-replacements",
                   options->reach_replacements,
                   "Tokens replaced in each row, one at a time, for reach")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->callback(
      [config, options, &context] { evaluate(config->resolve(), *options, context); });
}

}  // namespace bifocal
