// The training loop: step, log, checkpoint, next stage; resumes from the newest complete
// checkpoint.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "config/run_config.h"
#include "core/log.h"
#include "data/row_source.h"
#include "distill/stage.h"
#include "train/optimizer.h"

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
};

// What a run is made of, besides its stages.
struct TrainSetup {
  RunConfig config;
  std::string config_text;   // resolved, stored in every checkpoint
  std::string model_config;  // config.json of the student, stored in every checkpoint
  // Hash of what another run may not continue: model, teacher, data.
  std::string identity;
  const RowSource* rows = nullptr;  // whose counts are logged; nullptr: none are
};

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

  // Runs what is left of all stages. Writes metrics.jsonl and checkpoints/ under the run directory.
  // Collective.
  void run();

 private:
  void run_stage(const TrainStage& stage);
  void report_memory();
  void report_epochs(const TrainStage& stage);
  void report(const TrainStage& stage, const StepResult& result, double norm, double rate);
  void save(const std::string& stage, std::int64_t stage_step);
  void drop_later_metrics() const;

  bool speaks() const { return mesh_->world().rank() == 0; }

  Context context_;
  TrainSetup setup_;
  const Mesh* mesh_;
  std::vector<TrainStage> stages_;
  Optimizer optimizer_;
  Gradients gradients_;
  Console console_;
  std::unique_ptr<JsonLines> metrics_;
  std::filesystem::path directory_;
  std::size_t stage_index_ = 0;
  std::int64_t stage_step_ = 0;
  std::int64_t step_ = 0;      // over all stages
  std::int64_t next_row_ = 0;  // data position of the next step
  Stopwatch step_watch_;
  double seconds_per_step_ = 0.0;  // smoothed; 0 before the first step
};

}  // namespace bifocal
