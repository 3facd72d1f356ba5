// `bifocal status`: where a run stands, on one screen.
#include <cmath>
#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/run_record.h"
#include "core/log.h"
#include "core/memory.h"

namespace bifocal {

namespace {

constexpr std::size_t kLines = 5;  // of checkpoints and of events

void print(const char* name, const std::string& text) {
  fmt::print("{:<11} {}\n", name, text);
}

void print_step(const RunRecord& run) {
  if (run.steps.empty()) {
    print("step", "no step is logged yet");
    return;
  }
  const StepRecord& last = run.steps.back();
  print("stage",
        fmt::format("{}, step {} of {} ({:.1f} %), {} over all stages",
                    run.is_finished() ? "finished: " + last.stage : last.stage,
                    format_count(last.stage_step),
                    format_count(last.stage_steps),
                    100.0 * static_cast<double>(last.stage_step) /
                        static_cast<double>(std::max<std::int64_t>(1, last.stage_steps)),
                    format_count(last.step)));
  std::string loss = fmt::format("{:.5f}", last.loss);
  if (!std::isnan(last.kl)) {
    loss += fmt::format("  KL {:.5f}", last.kl);
  }
  print("loss", loss + fmt::format("  norm {:.3g}  rate {:.2e}", last.norm, last.rate));
  std::string speed = format_tokens_per_second(last.tokens_per_second);
  if (!std::isnan(last.mfu)) {
    speed += fmt::format("  MFU {:.1f} %", 100.0 * last.mfu);
  }
  speed += fmt::format("  {:.3g} s for the last step", last.seconds);
  if (last.stage_step < last.stage_steps) {
    const double left = last.seconds * static_cast<double>(last.stage_steps - last.stage_step);
    speed += fmt::format("  left {} of this stage", format_duration(left));
  }
  print("speed", speed);
  if (!std::isnan(last.memory)) {
    print("memory", fmt::format("peak {} on rank 0", format_bytes(last.memory)));
  }
  if (last.skipped > 0) {
    print("skipped", fmt::format("{} steps of this stage", format_count(last.skipped)));
  }
}

void print_status(const RunRecord& run) {
  std::string name = run.directory.string();
  if (!run.steps.empty()) {
    name += fmt::format("  (last line {} ago)", format_duration(run.age));
  }
  print("run", name);
  print_step(run);
  if (!run.validations.empty()) {
    const ValidationRecord& last = run.validations.back();
    print("held out",
          fmt::format("KL {:.5f}  top-1 {:.2f} %  perplexity {:.4f} (teacher {:.4f})  at step {}",
                      last.kl,
                      100.0 * last.agreement,
                      last.perplexity,
                      last.teacher_perplexity,
                      format_count(last.step)));
  }
  const auto shown = [](std::size_t count) { return std::min(count, kLines); };
  for (std::size_t i = 0; i < shown(run.checkpoints.size()); ++i) {
    const CheckpointRecord& one = run.checkpoints[i];
    print(i == 0 ? "checkpoints" : "",
          fmt::format("step {:<10} {:>11}  {} ago, {}",
                      format_count(one.step),
                      format_bytes(one.bytes),
                      format_duration(one.age),
                      one.stage == "done"
                          ? std::string("the end")
                          : fmt::format("{} after {}", one.stage, format_count(one.stage_step))));
  }
  if (run.checkpoints.empty()) {
    print("checkpoints", "none");
  }
  for (std::size_t i = 0; i < shown(run.events.size()); ++i) {
    const EventRecord& one = run.events[run.events.size() - 1 - i];
    print(i == 0 ? "events" : "", fmt::format("step {}: {}", format_count(one.step), one.text));
  }
}

}  // namespace

void add_status_command(CLI::App& app, const CommandContext& context) {
  CLI::App* command = app.add_subcommand(
      "status",
      "Show where a run stands: step, loss, speed, time left, memory, checkpoints, events");
  const auto directory = std::make_shared<std::string>();
  command->add_option("run", *directory, "Run directory")->required();
  command->callback([directory, &context] {
    require_one_rank(context, "status");
    print_status(read_run(*directory));
  });
}

}  // namespace bifocal
