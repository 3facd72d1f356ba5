// The training loop.
#include "train/trainer.h"

#include <algorithm>
#include <cmath>

#include "core/log.h"
#include "plan/memory_forecast.h"
#include "train/schedule.h"

namespace bifocal {

namespace fs = std::filesystem;

Trainer::Trainer(Context context,
                 TrainSetup setup,
                 const Mesh& mesh,
                 Weights& weights,
                 std::vector<TrainStage> stages,
                 Memory* host_memory)
    : context_(context),
      setup_(std::move(setup)),
      mesh_(&mesh),
      stages_(std::move(stages)),
      optimizer_(context, weights, setup_.config.optimizer, host_memory),
      gradients_(context, weights.table(), mesh.world()),
      directory_(setup_.config.run.directory),
      log_(setup_.config, setup_.rows, context.memory, mesh.world().rank() == 0),
      writer_(directory_ / "checkpoints",
              {.newest = setup_.config.checkpoint.keep,
               .multiples_of = setup_.config.checkpoint.keep_every},
              mesh.world()) {
  if (keeps_state_copy(setup_.config)) {
    optimizer_.keep_copy();
  }
}

void Trainer::resume() {
  const std::optional<fs::path> newest = latest_checkpoint(directory_ / "checkpoints");
  if (!newest) {
    return;
  }
  phase(context_, "loading the checkpoint");
  const CheckpointInfo info = read_checkpoint_info(*newest);
  BIFOCAL_REQUIRE(
      info.model_hash == setup_.identity,
      "[train] {} was written by a run with another model, teacher, data or run.dtype (auto: "
      "float32 on CPUs, bfloat16 on GPUs): set another run.directory, or the configuration it "
      "holds",
      newest->string());
  std::size_t index = 0;
  while (index < stages_.size() && stages_[index].name != info.stage) {
    ++index;
  }
  BIFOCAL_REQUIRE(index < stages_.size() || info.stage == "done",
                  "[train] {} ends in stage \"{}\", which this configuration does not have",
                  newest->string(),
                  info.stage);
  const Stopwatch watch;
  std::int64_t bytes = 0;
  optimizer_.load([&](const std::vector<ShardedTensor>& tensors) {
    bytes = load_checkpoint(*newest, tensors, mesh_->world());
  });
  const double seconds = watch.seconds();
  stage_index_ = index;
  stage_step_ = info.stage_step;
  step_ = info.step;
  next_row_ = info.next_row;
  skipped_ = info.skipped;
  saved_step_ = info.step;
  log_.print(fmt::format("resumed from {} (step {}): {} in {:.1f} s",
                         newest->string(),
                         format_count(step_),
                         format_bytes(static_cast<double>(bytes)),
                         seconds));
}

RunPlace Trainer::place(const TrainStage& stage) const {
  return {.stage = stage.name,
          .stage_step = stage_step_,
          .stage_steps = stage.steps,
          .step = step_,
          .next_row = next_row_,
          .skipped = skipped_};
}

int Trainer::signal() const {
  return setup_.signals == nullptr ? 0 : setup_.signals->agreed(mesh_->world());
}

std::size_t Trainer::end_of_run() const {
  if (setup_.until.empty()) {
    return stages_.size();
  }
  const auto last = std::ranges::find(stages_, setup_.until, &TrainStage::name);
  BIFOCAL_REQUIRE(last != stages_.end(),
                  "[train] wanted to run until the end of {}, which this run does not have: leave "
                  "--until out",
                  setup_.until);
  return static_cast<std::size_t>(last - stages_.begin()) + 1;
}

RunEnd Trainer::run() {
  const std::size_t end = end_of_run();
  log_.open(stage_index_ < stages_.size() ? place(stages_[stage_index_]) : RunPlace{.step = step_});
  while (stage_index_ < end) {
    if (run_stage(stages_[stage_index_])) {
      return RunEnd::stopped;
    }
  }
  if (stage_index_ < stages_.size()) {
    if (step_ != saved_step_) {
      save(stages_[stage_index_], true);
    }
    log_.print(fmt::format("finished {} after {} steps; without --until the run goes on",
                           setup_.until,
                           format_count(step_)));
    return RunEnd::finished;
  }
  log_.print(fmt::format(
      "finished after {} steps: {}", format_count(step_), (directory_ / "checkpoints").string()));
  return RunEnd::finished;
}

bool Trainer::run_stage(const TrainStage& stage) {
  const std::int64_t per_step = setup_.config.data.rows_per_step;
  const std::int64_t every = setup_.config.checkpoint.every;
  log_.begin_stage(stage_step_ == 0);
  if (stage_step_ == 0) {
    optimizer_.reset();
    skipped_ = 0;
  }
  const std::unique_ptr<Stage> work = stage.make(next_row_ - stage_step_ * per_step);
  while (stage_step_ < stage.steps) {
    if (const int got = signal(); got != 0) {
      if (step_ != saved_step_) {
        save(stage, true);
      }
      finish_save(stage);
      log_.stopped(place(stage), name_of_signal(got));
      return true;
    }
    begin_step(context_, stage.name, step_ + 1);
    log_.begin_step();
    gradients_.clear();
    const StepResult result = work->run_step(stage_step_, gradients_);
    const bool is_skipped = !update(stage, *work, result);
    const StepReport report = report_of(stage, result, is_skipped);
    skipped_ += is_skipped ? 1 : 0;
    skipped_in_row_ = is_skipped ? skipped_in_row_ + 1 : 0;
    ++stage_step_;
    ++step_;
    next_row_ += per_step;
    phase(context_, "log");
    log_.finish_step(place(stage), report, result);
    require_updates(stage);
    validate(stage);
    report_save(stage, writer_.poll());
    if (every > 0 && step_ % every == 0 && stage_step_ < stage.steps) {
      save(stage, false);
    }
  }
  log_.finish_stage(place(stage));
  optimizer_.reset();
  if (setup_.config.checkpoint.stage_ends) {
    save(stage, true);
  }
  finish_save(stage);
  ++stage_index_;
  stage_step_ = 0;
  skipped_ = 0;
  return false;
}

bool Trainer::update(const TrainStage& stage, const Stage& work, const StepResult& result) {
  // Sums over all ranks: every rank decides alike.
  if (!std::isfinite(result.loss) ||
      !std::isfinite(gradient_norm(result.unit_squares, result.unit_factors))) {
    return false;
  }
  phase(context_, "optimizer");
  const double factor = schedule_factor(stage.schedule, stage.steps, stage_step_);
  const double new_rate = stage.new_rate > 0.0 ? stage.new_rate : stage.schedule.rate;
  optimizer_.update({.trains = [&](const Parameter& p) { return work.trains(p); },
                     .rate =
                         [&](const Parameter& p) {
                           return factor * (p.is_new() ? new_rate : stage.schedule.rate);
                         },
                     .decays = [&](const Parameter& p) { return stage.decays && p.decays; },
                     .clip_scope = work.clip_scope(),
                     .clip = stage.schedule.clip,
                     .unit_factors = result.unit_factors,
                     .unit_squares = result.unit_squares,
                     .number = stage_step_ + 1 - skipped_},
                    gradients_);
  return true;
}

// Of the step that follows stage_step_.
StepReport Trainer::report_of(const TrainStage& stage,
                              const StepResult& result,
                              bool is_skipped) const {
  StepReport report{
      .norm = gradient_norm(result.unit_squares, result.unit_factors),
      .rate = stage.schedule.rate * schedule_factor(stage.schedule, stage.steps, stage_step_),
      .is_skipped = is_skipped};
  if (stage.row_flop && setup_.config.run.peak_tflops > 0.0 && mesh_->world().rank() == 0) {
    // Rows are packed to one length, so the first stands for the others.
    report.flop = stage.row_flop(next_row_) *
                  static_cast<double>(setup_.config.data.rows_per_step) / mesh_->world().size();
  }
  return report;
}

void Trainer::require_updates(const TrainStage& stage) {
  if (skipped_in_row_ < setup_.config.run.max_skipped) {
    return;
  }
  finish_save(stage);
  fail(
      "[train] {} steps in a row up to {} step {} had a loss or gradient that is not finite: "
      "wanted fewer than run.max_skipped. Lower {}.rate, or look at the data of these steps; the "
      "last checkpoint is intact",
      skipped_in_row_,
      stage.name,
      stage_step_,
      stage.name);
}

void Trainer::validate(const TrainStage& stage) {
  const std::int64_t every = setup_.config.evaluate.every;
  if (every > 0 && setup_.validate && (step_ % every == 0 || stage_step_ == stage.steps)) {
    log_.validation(place(stage), setup_.validate());
  }
}

CheckpointInfo Trainer::info_after(const TrainStage& stage) const {
  CheckpointInfo info{.step = step_,
                      .stage = stage.name,
                      .stage_step = stage_step_,
                      .next_row = next_row_,
                      .model_hash = setup_.identity,
                      .configuration = setup_.config_text,
                      .model_config = setup_.model_config,
                      .skipped = skipped_};
  if (stage_step_ == stage.steps) {
    const std::size_t next = stage_index_ + 1;
    info.stage = next < stages_.size() ? stages_[next].name : "done";
    info.stage_step = 0;
    info.skipped = 0;
  }
  return info;
}

void Trainer::save(const TrainStage& stage, bool waits) {
  phase(context_, "save");
  finish_save(stage);  // of the copy that is about to change
  const Stopwatch watch;
  std::optional<SaveReport> report;
  optimizer_.save([&](const std::vector<ShardedTensor>& tensors) {
    writer_.start(info_after(stage), tensors);
    if (waits || !optimizer_.keeps_copy()) {
      report = writer_.finish();
    }
  });
  saved_step_ = step_;
  save_delay_ = watch.seconds();
  report_save(stage, report);
}

void Trainer::finish_save(const TrainStage& stage) {
  const Stopwatch watch;
  const std::optional<SaveReport> report = writer_.finish();
  save_delay_ += watch.seconds();
  report_save(stage, report);
}

void Trainer::report_save(const TrainStage& stage, const std::optional<SaveReport>& report) {
  if (report) {
    log_.saved(place(stage), *report, save_delay_);
  }
}

}  // namespace bifocal
