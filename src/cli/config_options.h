// `--config file.toml`, any number of them, and one `--section.key VALUE` per declared option, for
// any command.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "config/run_config.h"

namespace CLI {
class App;
}

namespace bifocal {

// What the command line said; filled while CLI11 parses, read by the command's callback.
class ConfigOptions {
 public:
  // Registers the options on `command`. The result must live until parsing is over: capture it by
  // value in the command's callback.
  static std::shared_ptr<ConfigOptions> add_to(CLI::App& command);

  // Default < files in their order < command line, checked. Throws Error as read_run_config does.
  RunConfig resolve() const;

 private:
  std::vector<std::string> files_;
  std::map<std::string, std::vector<std::string>> texts_;  // by key; empty: not given
};

// For a word of the command line that CLI11 did not expect: "did you mean --data.row_tokens?" when
// it has the form of a configuration option, else empty.
std::string suggest_option(const std::string& word);

}  // namespace bifocal
