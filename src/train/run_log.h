// What a run tells while it trains: lines for people, metrics.jsonl and events/ (TensorBoard) of
// its directory for machines.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "checkpoint/checkpoint_writer.h"
#include "config/run_config.h"
#include "core/log.h"
#include "core/memory.h"
#include "data/row_source.h"
#include "distill/stage.h"
#include "evaluate/validation.h"
#include "train/event_file.h"
#include "train/loss_watch.h"

namespace bifocal {

// Where a run stands after a step.
struct RunPlace {
  std::string stage;
  std::int64_t stage_step = 0;  // steps done of the stage
  std::int64_t stage_steps = 0;
  std::int64_t step = 0;      // steps done over all stages
  std::int64_t next_row = 0;  // data position
  std::int64_t skipped = 0;   // steps of the stage without an update
};

// What a step was.
struct StepReport {
  double norm = 0.0;  // of the gradient before clipping
  double rate = 0.0;
  bool is_skipped = false;
  double flop = 0.0;  // of a rank's products; 0: not counted
};

// Every call but the constructor's is for all ranks; rank 0 alone speaks and writes.
class RunLog {
 public:
  // rows: whose counts are logged; nullptr: none are.
  RunLog(const RunConfig& config, const RowSource* rows, const Memory& memory, bool speaks);

  // Opens the files of a run that stands at `place`: what metrics.jsonl holds of later steps is
  // dropped, and losses before are remembered. Throws Error where they cannot be written.
  void open(const RunPlace& place);

  // is_new: not resumed in its middle.
  void begin_stage(bool is_new);

  void begin_step() { watch_.restart(); }

  void finish_step(const RunPlace& place, const StepReport& report, const StepResult& result);
  void validation(const RunPlace& place, const Validation& found);
  void finish_stage(const RunPlace& place);
  // A checkpoint has become complete; delay: seconds that steps waited for it.
  void saved(const RunPlace& place, const SaveReport& report, double delay);
  // The run ends early because of a signal; its state is saved.
  void stopped(const RunPlace& place, std::string_view signal);

  void print(const std::string& line) { console_.print(line); }

 private:
  struct Speed {
    double seconds = 0.0;            // of this step
    double tokens_per_second = 0.0;  // smoothed
    double left = 0.0;               // seconds to the end of the stage
    double mfu = 0.0;                // share of run.peak_tflops; 0: not known
  };

  bool writes_after(const RunPlace& place) const;
  Speed speed_of(const RunPlace& place, const StepReport& report);
  void write_step(const RunPlace& place,
                  const StepReport& report,
                  const StepResult& result,
                  const Speed& speed);
  void report_skip(const RunPlace& place, const StepReport& report, const StepResult& result);
  void report_spike(const RunPlace& place, double loss);
  void report_epochs(const RunPlace& place);
  void print_memory();

  RunConfig config_;
  const RowSource* rows_;
  const Memory* memory_;
  bool speaks_;
  std::filesystem::path directory_;
  Console console_;
  std::unique_ptr<JsonLines> metrics_;
  std::unique_ptr<EventFile> events_;
  LossWatch losses_;
  Stopwatch watch_;
  double seconds_per_step_ = 0.0;  // smoothed; 0 before the first step
};

}  // namespace bifocal
