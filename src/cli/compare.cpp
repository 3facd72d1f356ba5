// `bifocal compare`: graded sets side by side, by the length of their answers.
#include <chrono>
#include <ctime>
#include <fstream>
#include <thread>

#include <CLI/CLI.hpp>
#include <fmt/chrono.h>

#include "cli/commands.h"
#include "core/error.h"
#include "core/file.h"
#include "evaluate/compare_report.h"
#include "evaluate/plot.h"

namespace bifocal {

namespace {

struct CompareCommand {
  std::vector<std::string> graded;
  std::vector<std::string> names;
  CompareOptions options;
  ReportOrigin origin{.what = "Comparison"};
  std::string json;
  std::string markdown;
  std::string plot;
  bool append = false;
};

// "2 CPU cores, Debian GNU/Linux 12 (bookworm)"
std::string machine_text() {
  std::string system = "Linux";
  std::ifstream release("/etc/os-release");
  for (std::string line; std::getline(release, line);) {
    constexpr std::string_view kKey = "PRETTY_NAME=\"";
    if (line.starts_with(kKey) && line.size() > kKey.size()) {
      system = line.substr(kKey.size(), line.size() - kKey.size() - 1);
    }
  }
  return fmt::format("{} CPU cores, {}", std::thread::hardware_concurrency(), system);
}

std::string today() {
  return fmt::format("{:%Y-%m-%d}", fmt::gmtime(std::time(nullptr)));
}

std::vector<GradedSet> read_sets(const CompareCommand& command) {
  BIFOCAL_REQUIRE(command.names.empty() || command.names.size() == command.graded.size(),
                  "[compare] wanted a --name for each of the {} sets or none, got {}",
                  command.graded.size(),
                  command.names.size());
  std::vector<GradedSet> sets;
  for (std::size_t s = 0; s < command.graded.size(); ++s) {
    sets.push_back(read_graded(command.graded[s]));
    if (!command.names.empty()) {
      sets.back().name = command.names[s];
    }
  }
  return sets;
}

std::string plot_of(const Comparison& comparison, const std::string& title) {
  Plot plot{.title = title,
            .x_label = "typical answer length (tokens)",
            .y_label = "right answers, 95 % interval"};
  for (std::size_t s = 0; s < comparison.sets.size(); ++s) {
    plot.series.push_back({.name = comparison.sets[s].name});
    for (const GroupComparison& bin : comparison.bins) {
      plot.series.back().points.push_back(
          {bin.typical_tokens, bin.rates[s].value, bin.rates[s].interval});
    }
  }
  return plot_svg(plot);
}

void run_compare(const CompareCommand& command) {
  const Comparison comparison = compare_sets(read_sets(command), command.options);
  ReportOrigin origin = command.origin;
  origin.commit = BIFOCAL_COMMIT;
  origin.date = today();
  origin.machine = machine_text();
  const std::string markdown = comparison_markdown(comparison, origin);
  fmt::print("{}", markdown);
  // Everything is made before anything is written.
  nlohmann::ordered_json json = comparison_json(comparison, origin);
  if (command.append && !command.json.empty()) {
    json = append_report(command.json, json);
  }
  const std::string plot = command.plot.empty() ? "" : plot_of(comparison, origin.what);
  const std::string before =
      command.append && !command.markdown.empty() ? read_file(command.markdown) + "\n" : "";
  if (!command.json.empty()) {
    write_file_atomically(command.json, json.dump(1) + "\n");
  }
  if (!command.markdown.empty()) {
    write_file_atomically(command.markdown, before + markdown);
  }
  if (!command.plot.empty()) {
    write_file_atomically(command.plot, plot);
  }
}

}  // namespace

void add_compare_command(CLI::App& app, const CommandContext& context) {
  CLI::App* command = app.add_subcommand(
      "compare",
      "Compare graded sets over the same problems: rates with intervals, by answer length, and how "
      "answers fail. Differences are against the first set");
  const auto options = std::make_shared<CompareCommand>();
  command->add_option("graded", options->graded, "Two or more files of `bifocal grade`")
      ->required()
      ->expected(2, 64);
  command
      ->add_option("--name", options->names, "Name of each set, in their order; default: its own")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  CompareOptions& compare = options->options;
  command
      ->add_option("--long-tokens",
                   compare.long_tokens,
                   "Answers, and problems by their typical length, are long above it")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option("--bins",
                   compare.bin_edges,
                   "Lengths that part the bins, as 100,200,400; default: powers of 2")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  command->add_option("--resamples", compare.resamples, "Of the bootstrap")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--seed", compare.seed, "Of the bootstrap")->capture_default_str();
  command->add_flag(
      "--common", compare.common_only, "Leave out problems that some set lacks, and name them");
  command->add_option("--title", options->origin.what, "Title of the report and the plot")
      ->capture_default_str();
  command->add_option("--command", options->origin.command, "Command that the report shows");
  command->add_option("--notes", options->origin.notes, "Sentences that the report shows");
  command->add_option("--json", options->json, "Write the report here as JSON");
  command->add_option("--markdown", options->markdown, "Write the tables here");
  command->add_option("--plot", options->plot, "Write rates against length here, as SVG");
  command->add_flag("--append",
                    options->append,
                    "Add to the files of --json and --markdown, which must be there");
  command->callback([options, &context] {
    require_one_rank(context, "compare");
    run_compare(*options);
  });
}

}  // namespace bifocal
