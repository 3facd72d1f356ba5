// Registers the option table with CLI11 and hands its texts to the configuration reader.
#include "cli/config_options.h"

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "config/options.h"
#include "config/read.h"

namespace bifocal {

std::shared_ptr<ConfigOptions> ConfigOptions::add_to(CLI::App& command) {
  auto given = std::make_shared<ConfigOptions>();
  command
      .add_option(
          "--config",
          given->files_,
          "TOML file with the options below; given several times, a later file changes what "
          "it names")
      ->type_name("FILE")
      ->allow_extra_args(false)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  RunConfig defaults;
  for (const OptionSection& section : option_sections()) {
    for (const Option& option : section.options) {
      const std::string help = fmt::format("{}: {}", option.help, describe_values(option));
      CLI::Option* added = command.add_option("--" + option.key, given->texts_[option.key], help)
                               ->type_name("")
                               ->default_str(format_toml(get_value(option, defaults)))
                               ->group(fmt::format("[{}] {}", section.name, section.help));
      if (is_list(option)) {
        added->allow_extra_args(false)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
      } else {
        added->expected(1)->multi_option_policy(CLI::MultiOptionPolicy::Throw);
      }
    }
  }
  return given;
}

RunConfig ConfigOptions::resolve() const {
  std::vector<Override> overrides;
  for (const auto& [key, texts] : texts_) {
    if (!texts.empty()) {
      overrides.push_back({key, texts});
    }
  }
  return read_run_config(files_, overrides);
}

std::string suggest_option(const std::string& word) {
  const bool is_option = word.starts_with("--") && word.find('.') != std::string::npos;
  const std::string key = is_option ? word.substr(2, word.find('=') - 2) : "";
  if (!is_option || find_option(key) != nullptr) {
    return "";
  }
  return fmt::format("unknown option --{}: did you mean --{}?", key, nearest_key(key));
}

}  // namespace bifocal
