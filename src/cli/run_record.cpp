// Reading a run directory.
#include "cli/run_record.h"

#include <chrono>
#include <fstream>
#include <limits>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "checkpoint/manifest.h"
#include "checkpoint/step_directory.h"
#include "core/error.h"
#include "core/file.h"
#include "core/memory.h"

namespace bifocal {

namespace fs = std::filesystem;

namespace {

using Json = nlohmann::json;

double number(const Json& value) {
  return value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN();
}

double number(const Json& line, const char* key) {
  return line.contains(key) ? number(line[key]) : std::numeric_limits<double>::quiet_NaN();
}

std::int64_t count(const Json& line, const char* key) {
  return line.contains(key) && line[key].is_number_integer() ? line[key].get<std::int64_t>() : 0;
}

std::string text(const Json& line, const char* key) {
  return line.contains(key) && line[key].is_string() ? line[key].get<std::string>() : "";
}

std::vector<double> numbers(const Json& line, const char* key) {
  std::vector<double> values;
  if (line.contains(key) && line[key].is_array()) {
    for (const Json& value : line[key]) {
      values.push_back(number(value));
    }
  }
  return values;
}

StepRecord step_of(const Json& line) {
  return {.step = count(line, "step"),
          .stage = text(line, "stage"),
          .stage_step = count(line, "stage_step"),
          .stage_steps = count(line, "stage_steps"),
          .skipped = count(line, "skipped_steps"),
          .loss = number(line, "loss"),
          .kl = number(line, "kl"),
          .ce = number(line, "ce"),
          .norm = number(line, "grad_norm"),
          .rate = number(line, "rate"),
          .seconds = number(line, "seconds"),
          .tokens_per_second = number(line, "tokens_per_second"),
          .mfu = number(line, "mfu"),
          .memory = number(line, "memory_bytes"),
          .layer_losses = numbers(line, "layer_losses")};
}

ValidationRecord validation_of(const Json& line) {
  ValidationRecord record{.step = count(line, "step"),
                          .rows = count(line, "rows"),
                          .kl = number(line, "kl"),
                          .agreement = number(line, "top1_agreement"),
                          .perplexity = number(line, "student_perplexity"),
                          .teacher_perplexity = number(line, "teacher_perplexity"),
                          .gate_means = numbers(line, "gate_means"),
                          .far_shares = numbers(line, "far_shares")};
  if (line.contains("by_position") && line["by_position"].is_array()) {
    for (const Json& bucket : line["by_position"]) {
      if (bucket.is_object()) {
        record.kl_by_position.emplace_back(text(bucket, "position"), number(bucket, "kl"));
      }
    }
  }
  return record;
}

EventRecord event_of(const Json& line, const std::string& kind) {
  const std::string where =
      fmt::format("{} step {}", text(line, "stage"), count(line, "stage_step"));
  EventRecord event{.step = count(line, "step")};
  if (kind == "skipped") {
    event.text = fmt::format("{} skipped: loss {}, gradient norm {}",
                             where,
                             text(line, "loss"),
                             text(line, "grad_norm"));
  } else if (kind == "spike") {
    event.text = fmt::format("{}: loss {:.5f} stands out (mean {:.5f}, deviation {:.5f})",
                             where,
                             number(line, "loss"),
                             number(line, "mean"),
                             number(line, "deviation"));
  } else if (kind == "epoch") {
    event.text = fmt::format("{} begins epoch {}", text(line, "source"), count(line, "epoch"));
  } else if (kind == "stopped") {
    event.text = fmt::format("{}: saved and stopped by {}", where, text(line, "signal"));
  } else if (kind == "checkpoint") {
    event.text = fmt::format("checkpoint of step {}: {} in {:.1f} s, steps waited {:.2f} s",
                             count(line, "saved_step"),
                             format_bytes(number(line, "bytes")),
                             number(line, "seconds"),
                             number(line, "delay_seconds"));
  } else {
    event.text = kind;
  }
  return event;
}

double age_of(const fs::path& path) {
  std::error_code error;
  const fs::file_time_type time = fs::last_write_time(path, error);
  return error ? 0.0
               : std::chrono::duration<double>(fs::file_time_type::clock::now() - time).count();
}

void read_metrics(const fs::path& path, RunRecord& run) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const Json object = Json::parse(line, nullptr, false);
    if (!object.is_object()) {
      continue;
    }
    const std::string kind = text(object, "event");
    if (kind.empty()) {
      run.steps.push_back(step_of(object));
    } else if (kind == "validation") {
      run.validations.push_back(validation_of(object));
    } else {
      run.events.push_back(event_of(object, kind));
    }
  }
  run.age = age_of(path);
}

void read_checkpoints(const fs::path& directory, RunRecord& run) {
  for (const std::int64_t step : complete_steps(directory)) {
    const fs::path path = step_path(directory, step);
    const Manifest manifest = read_manifest(path);
    CheckpointRecord record{.step = step,
                            .stage = manifest.info.stage,
                            .stage_step = manifest.info.stage_step,
                            .ranks = manifest.ranks,
                            .age = age_of(path / kManifestName)};
    for (const ManifestFile& one : manifest.files) {
      record.bytes += static_cast<double>(one.bytes);
    }
    run.checkpoints.push_back(record);
  }
}

}  // namespace

RunRecord read_run(const fs::path& directory) {
  BIFOCAL_REQUIRE(fs::exists(directory / "config.toml"),
                  "[run] wanted a run directory, got {} without a config.toml: name the "
                  "run.directory of a training run",
                  directory.string());
  RunRecord run{.directory = directory, .configuration = read_file(directory / "config.toml")};
  read_metrics(directory / "metrics.jsonl", run);
  read_checkpoints(directory / "checkpoints", run);
  return run;
}

}  // namespace bifocal
