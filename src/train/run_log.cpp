// Lines of a run.
#include "train/run_log.h"

#include <cmath>
#include <fstream>

#include <nlohmann/json.hpp>

#include "core/file.h"
#include "evaluate/divergence_json.h"
#include "train/data_log.h"

namespace bifocal {

namespace fs = std::filesystem;

namespace {

std::string layer_tag(const char* name, std::size_t layer) {
  return fmt::format("{}/layer_{:03}", name, layer);
}

nlohmann::ordered_json event_at(const RunPlace& place, const char* event) {
  return {{"step", place.step},
          {"stage", place.stage},
          {"stage_step", place.stage_step},
          {"event", event}};
}

// NaN, of layers without such a branch, is null in JSON; TensorBoard gets nothing.
void add_layers(EventFile::Scalars& scalars, const char* name, const std::vector<double>& values) {
  for (std::size_t layer = 0; layer < values.size(); ++layer) {
    if (!std::isnan(values[layer])) {
      scalars.emplace_back(layer_tag(name, layer), values[layer]);
    }
  }
}

// Shortest of what is given; a loss that is not finite prints as such.
std::string live_line(const RunPlace& place, const StepReport& report, const StepResult& result) {
  std::string line = fmt::format(
      "{} {}/{}  loss {:.5f}", place.stage, place.stage_step, place.stage_steps, result.loss);
  if (place.stage == "distill") {
    line += fmt::format("  KL {:.5f}", result.kl);
  }
  line += fmt::format("  norm {:.3g}  rate {:.2e}", report.norm, report.rate);
  if (place.skipped > 0) {
    line += fmt::format("  skipped {}", place.skipped);
  }
  return line;
}

}  // namespace

RunLog::RunLog(const RunConfig& config, const RowSource* rows, const Memory& memory, bool speaks)
    : config_(config),
      rows_(rows),
      memory_(&memory),
      speaks_(speaks),
      directory_(config.run.directory),
      console_(speaks) {}

bool RunLog::writes_after(const RunPlace& place) const {
  return place.stage_step % config_.run.log_every == 0 || place.stage_step == place.stage_steps;
}

void RunLog::open(const RunPlace& place) {
  if (!speaks_) {
    return;
  }
  const fs::path path = directory_ / "metrics.jsonl";
  if (std::ifstream file(path); file) {
    std::string kept;
    for (std::string line; std::getline(file, line);) {
      const auto object = nlohmann::json::parse(line, nullptr, false);
      if (!object.is_object() || object.value("step", std::int64_t{0}) > place.step) {
        break;
      }
      kept += line + "\n";
      if (object.value("stage", "") == place.stage && !object.contains("event") &&
          object.contains("loss") && object["loss"].is_number()) {
        losses_.is_spike(object["loss"].get<double>());
      }
    }
    write_file_atomically(path, kept);
  }
  metrics_ = std::make_unique<JsonLines>(path.string());
  events_ = std::make_unique<EventFile>(directory_ / "events", place.step + 1);
}

void RunLog::begin_stage(bool is_new) {
  seconds_per_step_ = 0.0;
  if (is_new) {
    losses_.reset();
  }
}

RunLog::Speed RunLog::speed_of(const RunPlace& place, const StepReport& report) {
  Speed speed{.seconds = watch_.seconds()};
  seconds_per_step_ =
      seconds_per_step_ == 0.0 ? speed.seconds : 0.9 * seconds_per_step_ + 0.1 * speed.seconds;
  const RunConfig::Data& data = config_.data;
  speed.tokens_per_second =
      static_cast<double>(data.rows_per_step * data.row_tokens) / seconds_per_step_;
  speed.left = seconds_per_step_ * static_cast<double>(place.stage_steps - place.stage_step);
  if (config_.run.peak_tflops > 0.0) {
    speed.mfu = report.flop / seconds_per_step_ / (1e12 * config_.run.peak_tflops);
  }
  return speed;
}

void RunLog::finish_step(const RunPlace& place,
                         const StepReport& report,
                         const StepResult& result) {
  const Speed speed = speed_of(place, report);
  if (!speaks_) {
    return;
  }
  std::string line = live_line(place, report, result);
  line += "  " + format_tokens_per_second(speed.tokens_per_second);
  if (speed.mfu > 0.0) {
    line += fmt::format("  MFU {:.1f} %", 100.0 * speed.mfu);
  }
  line += fmt::format("  memory {}  left {}",
                      format_bytes(static_cast<double>(memory_->peak_held_bytes())),
                      format_duration(speed.left));
  console_.live(line);
  if (writes_after(place)) {
    console_.plain(line);
    write_step(place, report, result, speed);
  }
  if (report.is_skipped) {
    report_skip(place, report, result);
  } else if (losses_.is_spike(result.loss)) {
    report_spike(place, result.loss);
  }
  report_epochs(place);
}

void RunLog::write_step(const RunPlace& place,
                        const StepReport& report,
                        const StepResult& result,
                        const Speed& speed) {
  const auto bytes = memory_->peak_held_bytes();
  nlohmann::ordered_json object{{"step", place.step},
                                {"stage", place.stage},
                                {"stage_step", place.stage_step},
                                {"stage_steps", place.stage_steps},
                                {"loss", result.loss},
                                {"grad_norm", report.norm},
                                {"rate", report.rate},
                                {"kept_tokens", result.kept},
                                {"skipped_steps", place.skipped},
                                {"seconds", speed.seconds},
                                {"tokens_per_second", speed.tokens_per_second},
                                {"memory_bytes", bytes}};
  EventFile::Scalars scalars{{"train/loss", result.loss},
                             {"train/grad_norm", report.norm},
                             {"train/rate", report.rate},
                             {"train/kept_tokens", result.kept},
                             {"train/skipped_steps", static_cast<double>(place.skipped)},
                             {"speed/seconds", speed.seconds},
                             {"speed/tokens_per_second", speed.tokens_per_second},
                             {"speed/memory_bytes", static_cast<double>(bytes)}};
  if (speed.mfu > 0.0) {
    object["mfu"] = speed.mfu;
    scalars.emplace_back("speed/mfu", speed.mfu);
  }
  if (place.stage == "distill") {
    object["kl"] = result.kl;
    scalars.emplace_back("train/kl", result.kl);
  }
  if (place.stage != "align") {
    object["ce"] = result.ce;
    scalars.emplace_back("train/ce", result.ce);
  }
  if (!result.layer_losses.empty()) {
    object["layer_losses"] = result.layer_losses;
    add_layers(scalars, "align", result.layer_losses);
  }
  if (rows_ != nullptr) {
    object["data"] = data_metrics(*rows_, place.next_row);
  }
  metrics_->write(object);
  events_->write(place.step, scalars);
}

void RunLog::report_skip(const RunPlace& place,
                         const StepReport& report,
                         const StepResult& result) {
  console_.print(
      fmt::format("{} step {} skipped: its loss is {}, its gradient's norm {} ({} skipped so far)",
                  place.stage,
                  place.stage_step,
                  result.loss,
                  report.norm,
                  place.skipped));
  nlohmann::ordered_json object = event_at(place, "skipped");
  object["loss"] = fmt::format("{}", result.loss);
  object["grad_norm"] = fmt::format("{}", report.norm);
  metrics_->write(object);
}

void RunLog::report_spike(const RunPlace& place, double loss) {
  console_.print(
      fmt::format("{} step {}: loss {:.5f} is far above the last {} (mean {:.5f}, "
                  "deviation {:.5f} with it)",
                  place.stage,
                  place.stage_step,
                  loss,
                  LossWatch::kWindow,
                  losses_.mean(),
                  losses_.deviation()));
  nlohmann::ordered_json object = event_at(place, "spike");
  object["loss"] = loss;
  object["mean"] = losses_.mean();
  object["deviation"] = losses_.deviation();
  metrics_->write(object);
}

// A line for every source that began another epoch in this step.
void RunLog::report_epochs(const RunPlace& place) {
  if (rows_ == nullptr) {
    return;
  }
  const std::int64_t begin = place.next_row - config_.data.rows_per_step;
  for (const EpochBegin& begun : epochs_begun(*rows_, begin, place.next_row)) {
    console_.print(fmt::format("data: {} begins epoch {} in step {}",
                               begun.source,
                               begun.number,
                               format_count(place.step)));
    nlohmann::ordered_json object = event_at(place, "epoch");
    object["source"] = begun.source;
    object["epoch"] = begun.number;
    metrics_->write(object);
  }
}

void RunLog::validation(const RunPlace& place, const Validation& found) {
  if (!speaks_) {
    return;
  }
  const DivergenceSums all = found.divergence.all();
  console_.print(
      fmt::format("{} {}/{}  held out: KL {:.5f}, top-1 {:.2f} %, perplexity {:.4f} "
                  "(teacher {:.4f}), {} rows",
                  place.stage,
                  place.stage_step,
                  place.stage_steps,
                  all.mean_kl(),
                  100.0 * all.agreement(),
                  all.student_perplexity(),
                  all.teacher_perplexity(),
                  found.rows));
  nlohmann::ordered_json object = event_at(place, "validation");
  object["rows"] = found.rows;
  object.update(to_json(all));
  object["by_position"] = by_position_json(found.divergence);
  object["gate_means"] = found.branches.gate_means;
  object["far_shares"] = found.branches.far_shares;
  metrics_->write(object);
  EventFile::Scalars scalars{{"validation/kl", all.mean_kl()},
                             {"validation/top1_agreement", all.agreement()},
                             {"validation/student_perplexity", all.student_perplexity()},
                             {"validation/teacher_perplexity", all.teacher_perplexity()}};
  for (std::size_t bucket = 0; bucket < found.divergence.by_position.size(); ++bucket) {
    const DivergenceSums& sums = found.divergence.by_position[bucket];
    if (sums.tokens > 0.0) {
      scalars.emplace_back("validation_kl/" + position_name(bucket), sums.mean_kl());
    }
  }
  add_layers(scalars, "gate_mean", found.branches.gate_means);
  add_layers(scalars, "far_share", found.branches.far_shares);
  events_->write(place.step, scalars);
}

void RunLog::finish_stage(const RunPlace& place) {
  console_.end_live();
  if (speaks_ && rows_ != nullptr) {
    console_.print(data_summary(*rows_, place.next_row));
  }
  print_memory();
}

void RunLog::saved(const RunPlace& place, const SaveReport& report, double delay) {
  if (!speaks_) {
    return;
  }
  console_.plain(fmt::format("checkpoint of step {}: {} in {:.1f} s, steps waited {:.2f} s",
                             format_count(report.step),
                             format_bytes(static_cast<double>(report.bytes)),
                             report.seconds,
                             delay));
  nlohmann::ordered_json object = event_at(place, "checkpoint");
  object["saved_step"] = report.step;
  object["bytes"] = report.bytes;
  object["seconds"] = report.seconds;
  object["delay_seconds"] = delay;
  metrics_->write(object);
  events_->write(place.step,
                 {{"checkpoint/seconds", report.seconds}, {"checkpoint/delay_seconds", delay}});
}

void RunLog::stopped(const RunPlace& place, std::string_view signal) {
  console_.end_live();
  console_.print(fmt::format("{}: saved after step {}; the same command goes on from there",
                             signal,
                             format_count(place.step)));
  if (speaks_) {
    nlohmann::ordered_json object = event_at(place, "stopped");
    object["signal"] = signal;
    metrics_->write(object);
  }
}

void RunLog::print_memory() {
  std::string line = fmt::format("memory of rank 0, peak {}:",
                                 format_bytes(static_cast<double>(memory_->peak_bytes())));
  for (std::size_t index = 0; index < static_cast<std::size_t>(Region::count); ++index) {
    const auto region = static_cast<Region>(index);
    const std::size_t bytes = memory_->peak_bytes(region);
    if (bytes > 0) {
      line += fmt::format(" {} {},", name_of(region), format_bytes(static_cast<double>(bytes)));
    }
  }
  line.back() = ';';
  line += fmt::format(" {} taken from the system.",
                      format_bytes(static_cast<double>(memory_->peak_held_bytes())));
  console_.print(line);
}

}  // namespace bifocal
