// `bifocal bench`: what ops, training steps and generation take on this machine.
#include <CLI/CLI.hpp>

#include "cli/bench_command.h"

namespace bifocal {

void add_bench_command(CLI::App& app, const CommandContext& context) {
  CLI::App* bench = app.add_subcommand(
      "bench", "Times of ops, training steps and generation, beside their floors and a peer");
  bench->require_subcommand(1);
  add_bench_ops_command(*bench, context);
  add_bench_step_command(*bench, context);
  add_bench_decode_command(*bench, context);
}

}  // namespace bifocal
