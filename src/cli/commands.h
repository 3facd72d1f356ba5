// The commands of `bifocal`, one function each, and what main hands to them.
#pragma once

#include <memory>
#include <string_view>

#include "parallel/mpi_communicator.h"

namespace CLI {
class App;
}

namespace bifocal {

class RankWatch;
struct RunConfig;

// The exit code of a run that a signal ended early, its state saved: EX_TEMPFAIL, start the same
// command again.
inline constexpr int kExitAgain = 75;

// Lives in main, longer than the CLI::App, so callbacks may hold a reference to it.
struct CommandContext {
  const MpiSession& mpi;
  int& exit_code;    // of the program when the command returns; 0 unless set
  RankWatch& watch;  // for commands of several ranks to start
};

// Throws Error "[command] ..." when the job has more than one rank: for commands that write files
// and share no work.
void require_one_rank(const CommandContext& context, std::string_view command);

// All ranks, from here on watched as the configuration says. Collective.
std::unique_ptr<Communicator> watched_world(const CommandContext& context, const RunConfig& config);

// Each registers one subcommand whose callback does the work and throws Error. Options that the
// callback reads must be owned by it (a shared_ptr captured by value). None prints errors or exits.
void add_plan_command(CLI::App& app, const CommandContext& context);
void add_synth_command(CLI::App& app, const CommandContext& context);
void add_tokenize_command(CLI::App& app, const CommandContext& context);
void add_rows_command(CLI::App& app, const CommandContext& context);
void add_pretrain_command(CLI::App& app, const CommandContext& context);
void add_train_command(CLI::App& app, const CommandContext& context);
void add_evaluate_command(CLI::App& app, const CommandContext& context);
void add_generate_command(CLI::App& app, const CommandContext& context);
void add_rollouts_command(CLI::App& app, const CommandContext& context);
void add_grade_command(CLI::App& app, const CommandContext& context);
void add_compare_command(CLI::App& app, const CommandContext& context);
void add_export_command(CLI::App& app, const CommandContext& context);
void add_merge_command(CLI::App& app, const CommandContext& context);
void add_memory_command(CLI::App& app, const CommandContext& context);
void add_inspect_command(CLI::App& app, const CommandContext& context);
void add_bench_command(CLI::App& app, const CommandContext& context);
void add_status_command(CLI::App& app, const CommandContext& context);
void add_report_command(CLI::App& app, const CommandContext& context);
void add_config_command(CLI::App& app, const CommandContext& context);

}  // namespace bifocal
