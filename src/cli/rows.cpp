// `bifocal rows`: what the rows of a configuration hold, source by source, without training.
#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/config_options.h"
#include "cli/session.h"
#include "core/file.h"
#include "data/row_report.h"

namespace bifocal {

namespace {

struct RowsOptions {
  std::int64_t rows = 1000;
  bool is_held_out = false;
  std::string json;
};

// As train reads them where the configuration names a model, and else for any.
RowSource open_source(const RunConfig& config, Split split) {
  return student_directory(config).empty() ? open_rows(config, split)
                                           : open_rows(config, student_config(config), split);
}

void report(const RunConfig& config, const RowsOptions& options) {
  const RowSource source =
      open_source(config, options.is_held_out ? Split::held_out : Split::train);
  const RowReport report = report_rows(source, config.data.row_tokens, options.rows);
  fmt::print("{}", to_text(report));
  if (!options.json.empty()) {
    write_file_atomically(options.json, to_json(report).dump(2) + "\n");
  }
}

}  // namespace

void add_rows_command(CLI::App& app, const CommandContext& context) {
  CLI::App* command = app.add_subcommand(
      "rows", "What training rows hold: sources, shares, epochs, lengths, padding; no training");
  const std::shared_ptr<ConfigOptions> config = ConfigOptions::add_to(*command);
  const auto options = std::make_shared<RowsOptions>();
  command->add_option("--rows", options->rows, "Rows to count, from the first one on")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_flag("--held-out", options->is_held_out, "Rows of held-out documents");
  command->add_option("--json", options->json, "Write the report here too");
  command->callback([config, options, &context] {
    require_one_rank(context, "rows");
    report(config->resolve(), *options);
  });
}

}  // namespace bifocal
