// The three benches. Each registers a subcommand of `bifocal bench`.
#pragma once

#include "cli/commands.h"

namespace bifocal {

void add_bench_ops_command(CLI::App& bench, const CommandContext& context);
void add_bench_step_command(CLI::App& bench, const CommandContext& context);
void add_bench_decode_command(CLI::App& bench, const CommandContext& context);

}  // namespace bifocal
