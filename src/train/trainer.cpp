// The training loop.
#include "train/trainer.h"

#include <cmath>
#include <fstream>

#include <nlohmann/json.hpp>

#include "core/file.h"
#include "train/data_log.h"
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
      console_(mesh.world().rank() == 0),
      directory_(setup_.config.run.directory) {}

void Trainer::resume() {
  const std::optional<fs::path> newest = latest_checkpoint(directory_ / "checkpoints");
  if (!newest) {
    return;
  }
  const CheckpointInfo info = read_checkpoint_info(*newest);
  BIFOCAL_REQUIRE(
      info.model_hash == setup_.identity,
      "[train] {} was written by a run with another model, teacher or data: set another "
      "run.directory, or the configuration it holds",
      newest->string());
  std::size_t index = 0;
  while (index < stages_.size() && stages_[index].name != info.stage) {
    ++index;
  }
  BIFOCAL_REQUIRE(index < stages_.size() || info.stage == "done",
                  "[train] {} ends in stage \"{}\", which this configuration does not have",
                  newest->string(),
                  info.stage);
  optimizer_.load([&](const std::vector<ShardedTensor>& tensors) {
    load_checkpoint(*newest, tensors, mesh_->world());
  });
  stage_index_ = index;
  stage_step_ = info.stage_step;
  step_ = info.step;
  next_row_ = info.next_row;
  console_.print(fmt::format("resumed from {} (step {})", newest->string(), format_count(step_)));
}

void Trainer::drop_later_metrics() const {
  const fs::path path = directory_ / "metrics.jsonl";
  std::ifstream file(path);
  if (!file) {
    return;
  }
  std::string kept;
  for (std::string line; std::getline(file, line);) {
    const auto object = nlohmann::json::parse(line, nullptr, false);
    if (object.is_discarded() || object.value("step", std::int64_t{0}) > step_) {
      break;
    }
    kept += line + "\n";
  }
  write_file_atomically(path, kept);
}

void Trainer::run() {
  if (speaks()) {
    drop_later_metrics();
    metrics_ = std::make_unique<JsonLines>((directory_ / "metrics.jsonl").string());
  }
  while (stage_index_ < stages_.size()) {
    run_stage(stages_[stage_index_]);
  }
  console_.print(fmt::format(
      "finished after {} steps: {}", format_count(step_), (directory_ / "checkpoints").string()));
}

void Trainer::run_stage(const TrainStage& stage) {
  const std::int64_t per_step = setup_.config.data.rows_per_step;
  const std::int64_t every = setup_.config.checkpoint.every;
  if (stage_step_ == 0) {
    optimizer_.reset();
  }
  const std::unique_ptr<Stage> work = stage.make(next_row_ - stage_step_ * per_step);
  seconds_per_step_ = 0.0;
  while (stage_step_ < stage.steps) {
    step_watch_.restart();
    gradients_.clear();
    const StepResult result = work->run_step(stage_step_, gradients_);
    BIFOCAL_REQUIRE(
        std::isfinite(result.loss),
        "[train] the loss of {} step {} is {}: wanted a finite one. Lower {}.rate, or look at "
        "the data of this step; the last checkpoint is intact",
        stage.name,
        stage_step_ + 1,
        result.loss,
        stage.name);
    const double factor = schedule_factor(stage.schedule, stage.steps, stage_step_);
    const double new_rate = stage.new_rate > 0.0 ? stage.new_rate : stage.schedule.rate;
    const double norm =
        optimizer_.update({.trains = [&](const Parameter& p) { return work->trains(p); },
                           .rate =
                               [&](const Parameter& p) {
                                 return factor * (p.is_new() ? new_rate : stage.schedule.rate);
                               },
                           .decays = [&](const Parameter& p) { return stage.decays && p.decays; },
                           .clip_scope = work->clip_scope(),
                           .clip = stage.schedule.clip,
                           .unit_factors = result.unit_factors,
                           .unit_squares = result.unit_squares,
                           .number = stage_step_ + 1},
                          gradients_);
    ++stage_step_;
    ++step_;
    next_row_ += per_step;
    report(stage, result, norm, factor * stage.schedule.rate);
    report_epochs(stage);
    if (every > 0 && step_ % every == 0 && stage_step_ < stage.steps) {
      save(stage.name, stage_step_);
    }
  }
  console_.end_live();
  if (speaks() && setup_.rows != nullptr) {
    console_.print(data_summary(*setup_.rows, next_row_));
  }
  report_memory();
  ++stage_index_;
  stage_step_ = 0;
  const std::string next = stage_index_ < stages_.size() ? stages_[stage_index_].name : "done";
  optimizer_.reset();
  if (setup_.config.checkpoint.stage_ends) {
    save(next, 0);
  }
}

void Trainer::report(const TrainStage& stage, const StepResult& result, double norm, double rate) {
  const double seconds = step_watch_.seconds();
  seconds_per_step_ = seconds_per_step_ == 0.0 ? seconds : 0.9 * seconds_per_step_ + 0.1 * seconds;
  if (!speaks()) {
    return;
  }
  const RunConfig::Data& data = setup_.config.data;
  const double tokens_per_second =
      static_cast<double>(data.rows_per_step * data.row_tokens) / seconds_per_step_;
  std::string line =
      fmt::format("{} {}/{}  loss {:.5f}", stage.name, stage_step_, stage.steps, result.loss);
  if (stage.name == "distill") {
    line += fmt::format("  KL {:.5f}", result.kl);
  }
  line += fmt::format(
      "  norm {:.3g}  rate {:.2e}  {}  left {}",
      norm,
      rate,
      format_tokens_per_second(tokens_per_second),
      format_duration(seconds_per_step_ * static_cast<double>(stage.steps - stage_step_)));
  console_.live(line);
  const std::int64_t log_every = setup_.config.run.log_every;
  if (stage_step_ % log_every != 0 && stage_step_ != stage.steps) {
    return;
  }
  console_.plain(line);
  nlohmann::ordered_json object{{"step", step_},
                                {"stage", stage.name},
                                {"stage_step", stage_step_},
                                {"loss", result.loss},
                                {"grad_norm", norm},
                                {"rate", rate},
                                {"kept_tokens", result.kept},
                                {"seconds", seconds},
                                {"tokens_per_second", tokens_per_second}};
  if (stage.name == "distill") {
    object["kl"] = result.kl;
  }
  if (stage.name != "align") {
    object["ce"] = result.ce;
  }
  if (!result.layer_losses.empty()) {
    object["layer_losses"] = result.layer_losses;
  }
  if (setup_.rows != nullptr) {
    object["data"] = data_metrics(*setup_.rows, next_row_);
  }
  metrics_->write(object);
}

// A line for every source that began another epoch in this step.
void Trainer::report_epochs(const TrainStage& stage) {
  if (!speaks() || setup_.rows == nullptr) {
    return;
  }
  const std::int64_t begin = next_row_ - setup_.config.data.rows_per_step;
  for (const EpochBegin& begun : epochs_begun(*setup_.rows, begin, next_row_)) {
    console_.print(fmt::format(
        "data: {} begins epoch {} in step {}", begun.source, begun.number, format_count(step_)));
    metrics_->write({{"step", step_},
                     {"stage", stage.name},
                     {"event", "epoch"},
                     {"source", begun.source},
                     {"epoch", begun.number}});
  }
}

void Trainer::report_memory() {
  std::string line = fmt::format("memory of rank 0, peak {}:",
                                 format_bytes(static_cast<double>(context_.memory.peak_bytes())));
  for (std::size_t index = 0; index < static_cast<std::size_t>(Region::count); ++index) {
    const auto region = static_cast<Region>(index);
    const std::size_t bytes = context_.memory.peak_bytes(region);
    if (bytes > 0) {
      line += fmt::format(" {} {},", name_of(region), format_bytes(static_cast<double>(bytes)));
    }
  }
  line.back() = '.';
  console_.print(line);
}

void Trainer::save(const std::string& stage, std::int64_t stage_step) {
  const CheckpointInfo info{.step = step_,
                            .stage = stage,
                            .stage_step = stage_step,
                            .next_row = next_row_,
                            .model_hash = setup_.identity,
                            .configuration = setup_.config_text,
                            .model_config = setup_.model_config};
  optimizer_.save([&](const std::vector<ShardedTensor>& tensors) {
    save_checkpoint(
        directory_ / "checkpoints", info, tensors, setup_.config.checkpoint.keep, mesh_->world());
  });
}

}  // namespace bifocal
