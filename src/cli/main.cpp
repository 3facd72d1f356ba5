// The program: its commands, and the one place where errors are caught, printed and turned into an
// exit code (0 done, 1 error, 2 usage, 75 stopped by a signal and saved).
#include <chrono>
#include <cstdio>
#include <exception>
#include <iostream>
#include <new>
#include <optional>
#include <sstream>
#include <string>
#include <thread>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/config_options.h"
#include "cli/version.h"
#include "core/error.h"
#include "core/memory.h"
#include "core/process.h"
#include "parallel/rank_watch.h"

namespace bifocal {

void require_one_rank(const CommandContext& context, std::string_view command) {
  const int ranks = context.mpi.size();
  BIFOCAL_REQUIRE(
      ranks == 1, "[{}] wanted one rank, got {}: run it without mpirun", command, ranks);
}

std::unique_ptr<Communicator> watched_world(const CommandContext& context,
                                            const RunConfig& config) {
  std::unique_ptr<Communicator> world = context.mpi.world();
  context.watch.start(
      *world, {.heartbeat = config.run.heartbeat_seconds, .progress = config.run.progress_seconds});
  return world;
}

namespace {

constexpr int kExitError = 1;
constexpr int kExitUsage = 2;
constexpr std::size_t kHelpColumn = 40;  // where the help of an option begins

void add_commands(CLI::App& app, const CommandContext& context) {
  add_plan_command(app, context);
  add_synth_command(app, context);
  add_tokenize_command(app, context);
  add_rows_command(app, context);
  add_pretrain_command(app, context);
  add_train_command(app, context);
  add_evaluate_command(app, context);
  add_generate_command(app, context);
  add_rollouts_command(app, context);
  add_grade_command(app, context);
  add_compare_command(app, context);
  add_export_command(app, context);
  add_merge_command(app, context);
  add_memory_command(app, context);
  add_inspect_command(app, context);
  add_bench_command(app, context);
  add_status_command(app, context);
  add_report_command(app, context);
  add_config_command(app, context);
}

// Prints what CLI11 has to say (help, version or a usage error) on rank 0. All ranks parse the same
// words, so all come here.
int end_of_parsing(const CLI::App& app, const CLI::ParseError& reason, int rank, char** argv) {
  std::ostringstream out;
  std::ostringstream err;
  const int code = app.exit(reason, out, err);
  if (rank == 0) {
    std::cout << out.str() << std::flush;
    std::cerr << err.str();
    for (char** word = argv + 1; code != 0 && *word != nullptr; ++word) {
      const std::string suggestion = suggest_option(*word);
      std::cerr << suggestion << (suggestion.empty() ? "" : "\n");
    }
    std::cerr << std::flush;
  }
  return code == 0 ? 0 : kExitUsage;
}

int run(const MpiSession& mpi, RankWatch& watch, int argc, char** argv) {
  int exit_code = 0;
  const CommandContext context{mpi, exit_code, watch};
  CLI::App app("Makes long-context students of transformers: a sliding window beside an mLSTM.",
               "bifocal");
  app.require_subcommand(1);
  app.get_formatter()->column_width(kHelpColumn);
  app.set_version_flag("--version", version_text);
  add_commands(app, context);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& reason) {
    return end_of_parsing(app, reason, mpi.rank(), argv);
  }
  return exit_code;
}

// Prints the error and ends the job. Ranks that share one error (require_all) all come here: the
// others wait a moment for rank 0, which ends them before they repeat its text.
int end_with_error(const MpiSession* mpi, RankWatch& watch, const std::string& text) {
  constexpr std::chrono::milliseconds kRankZeroFirst{500};
  if (mpi == nullptr || !mpi->active()) {
    fmt::print(stderr, "bifocal: error: {}\n", text);
    return kExitError;
  }
  if (watch.is_running()) {
    watch.announce_error(text);
  } else if (mpi->rank() != 0) {
    std::this_thread::sleep_for(kRankZeroFirst);
  }
  const ProgressState state = watch.progress().state();
  fmt::print(stderr,
             "bifocal: error on rank {} of {} (host {}){}: {}\n",
             mpi->rank(),
             mpi->size(),
             host_name(),
             state.marks > 0 ? ", " + describe(state) : "",
             text);
  std::fflush(stdout);
  std::fflush(stderr);
  watch.end_job(text);
  mpi->abort(kExitError);
}

std::string out_of_memory() {
  return fmt::format(
      "[memory] out of memory: the system refused an allocation; the process holds {}. Allow it "
      "more (the job's memory, ulimit -v), or use more ranks, memory.recompute or shorter rows",
      format_bytes(static_cast<double>(resident_bytes())));
}

// Ends a job that a signal stopped. Rank 0 alone carries the exit code, and leaves last: launchers
// kill what is left of a job when one rank exits with a code, and would report the kill.
int end_stopped(std::optional<MpiSession>& mpi) {
  constexpr std::chrono::milliseconds kRankZeroLast{500};
  const bool is_alone = mpi->size() == 1;
  const bool is_first = mpi->rank() == 0;
  mpi.reset();  // waits for all ranks
  if (!is_alone && is_first) {
    std::this_thread::sleep_for(kRankZeroLast);
  }
  return is_first ? kExitAgain : 0;
}

}  // namespace

}  // namespace bifocal

int main(int argc, char** argv) {
  bifocal::RankWatch watch;  // until after MPI_Finalize, in which a rank may be missing
  std::optional<bifocal::MpiSession> mpi;
  std::string error;
  try {
    mpi.emplace(&argc, &argv);
    const int code = bifocal::run(*mpi, watch, argc, argv);
    return code == bifocal::kExitAgain ? bifocal::end_stopped(mpi) : code;
  } catch (const std::bad_alloc&) {
    error = bifocal::out_of_memory();
  } catch (const std::exception& failure) {
    error = failure.what();
  }
  return bifocal::end_with_error(mpi ? &*mpi : nullptr, watch, error);
}
