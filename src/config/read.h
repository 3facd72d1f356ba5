// From files and the command line to a checked RunConfig, and back to a file.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "config/run_config.h"

namespace bifocal {

// One option of the command line: its texts in the order given (several for a list).
struct Override {
  std::string key;
  std::vector<std::string> texts;
};

// Defaults, then the files in their order, then the overrides: what comes later wins, key by key.
// Checked. Throws Error for what cannot be read, an unknown key (naming the nearest known one), a
// key that one file repeats, a wrong type, a value out of range (with file and line), and for what
// check_run_config refuses.
RunConfig read_run_config(const std::vector<std::string>& files,
                          const std::vector<Override>& overrides = {});

// The same for text that is at hand, such as the configuration stored in a checkpoint. `origin`
// stands in error texts where the file's name would.
RunConfig parse_run_config(std::string_view text, std::string_view origin);

// Every option with its value. parse_run_config(to_toml(c)) equals c, bit for bit.
std::string to_toml(RunConfig config);

// Throws Error where options contradict each other. What depends on a model, on data or on the
// number of ranks is left to `plan`.
void check_run_config(const RunConfig& config);

}  // namespace bifocal
