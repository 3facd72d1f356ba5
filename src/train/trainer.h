// The training loop: step, log, checkpoint, next stage; resumes from the newest complete
// checkpoint.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_writer.h"
#include "config/run_config.h"
#include "data/row_source.h"
#include "distill/stage.h"
#include "train/optimizer.h"
#include "train/run_log.h"
#include "train/signals.h"

namespace bifocal {

// One stage of a run. Rows are consumed in order over all stages.
struct TrainStage {
  std::string name;  // "align", "distill" or "pretrain"
  StageConfig schedule;
  std::int64_t steps = 0;
  double new_rate = 0.0;  // of new tensors; 0: schedule.rate
  bool decays = true;     // weight decay where a parameter has it
  // Makes the stage whose rows begin at this data position.
  std::function<std::unique_ptr<Stage>(std::int64_t first_row)> make;
  // Operations of the products of all ranks on the row at a data position; may be empty.
  std::function<double(std::int64_t position)> row_flop;
};

// What a run is made of, besides its stages.
struct TrainSetup {
  RunConfig config;
  std::string config_text;   // resolved, stored in every checkpoint
  std::string model_config;  // config.json of the student, stored in every checkpoint
  // Hash of what another run may not continue: model, teacher, data.
  std::string identity;
  const RowSource* rows = nullptr;  // whose counts are logged; nullptr: none are
  // Measures held-out rows, every evaluate.every steps and at the end of each stage. Collective.
  std::function<Validation()> validate;
  const StopSignals* signals = nullptr;  // looked at after every step; nullptr: none end the run
  // Name of the stage after which run() saves and returns, for another run to go on; empty: none.
  std::string until{};
};

enum class RunEnd : std::uint8_t { finished, stopped };

class Trainer {
 public:
  // host_memory: see Optimizer.
  Trainer(Context context,
          TrainSetup setup,
          const Mesh& mesh,
          Weights& weights,
          std::vector<TrainStage> stages,
          Memory* host_memory = nullptr);

  // Loads the newest complete checkpoint of the run directory, if there is one. Throws Error for
  // one of another model or data. Collective.
  void resume();

  // Runs what is left of all stages (to setup.until), or saves and returns after the step in which
  // a rank got a signal. Writes metrics.jsonl, events/ and checkpoints/ under the run directory;
  // inside a stage steps go on while a checkpoint is written, unless checkpoint.asynchronous is
  // false. A step whose loss or gradient is not finite updates nothing; its rows are consumed.
  // Throws Error after run.max_skipped of them in a row, and on all ranks alike where a save fails.
  // Collective.
  RunEnd run();

 private:
  // Whether a signal ended it early.
  bool run_stage(const TrainStage& stage);
  // False: the step's loss or gradient is not finite, and nothing has changed.
  bool update(const TrainStage& stage, const Stage& work, const StepResult& result);
  StepReport report_of(const TrainStage& stage, const StepResult& result, bool is_skipped) const;
  // Throws where too many steps in a row were skipped.
  void require_updates(const TrainStage& stage);
  void validate(const TrainStage& stage);
  RunPlace place(const TrainStage& stage) const;
  int signal() const;
  // After the stage's last step, the state belongs to the next one.
  CheckpointInfo info_after(const TrainStage& stage) const;
  void save(const TrainStage& stage, bool waits);
  // Reports a save that has become complete.
  void report_save(const TrainStage& stage, const std::optional<SaveReport>& report);
  // Waits for a save under way, which counts as that save's delay, and reports it.
  void finish_save(const TrainStage& stage);
  // Of the last stage to run. Throws Error where setup.until names none.
  std::size_t end_of_run() const;

  Context context_;
  TrainSetup setup_;
  const Mesh* mesh_;
  std::vector<TrainStage> stages_;
  Optimizer optimizer_;
  Gradients gradients_;
  std::filesystem::path directory_;
  RunLog log_;
  std::size_t stage_index_ = 0;
  std::int64_t stage_step_ = 0;
  std::int64_t step_ = 0;      // over all stages
  std::int64_t next_row_ = 0;  // data position of the next step
  std::int64_t skipped_ = 0;   // steps of the stage without an update
  std::int64_t skipped_in_row_ = 0;
  std::int64_t saved_step_ = 0;  // step_ of the newest checkpoint or the one that is pending
  double save_delay_ = 0.0;      // seconds that steps waited for it
  CheckpointWriter writer_;      // ends before the copy of the state that it writes
};

}  // namespace bifocal
