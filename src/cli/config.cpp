// `bifocal config`: checks a configuration and prints it whole, or prints its documentation.
#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/config_options.h"
#include "config/documentation.h"
#include "config/read.h"

namespace bifocal {

void add_config_command(CLI::App& app, const CommandContext& context) {
  CLI::App* command = app.add_subcommand("config", "Check a configuration and print every option");
  auto options = ConfigOptions::add_to(*command);
  auto wants_markdown = std::make_shared<bool>(false);
  command->add_flag("--markdown", *wants_markdown, "Print docs/configuration.md instead");
  command->callback([options, wants_markdown, &context] {
    require_one_rank(context, "config");
    fmt::print("{}", *wants_markdown ? configuration_markdown() : to_toml(options->resolve()));
  });
}

}  // namespace bifocal
