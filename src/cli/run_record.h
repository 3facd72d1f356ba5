// What a run directory says about its run: metrics, events and checkpoints, read back.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace bifocal {

// Lines of metrics.jsonl. What a line lacks, or has as null, is NaN, 0 or empty.
struct StepRecord {
  std::int64_t step = 0;
  std::string stage;
  std::int64_t stage_step = 0, stage_steps = 0;
  std::int64_t skipped = 0;
  double loss = 0.0, kl = 0.0, ce = 0.0, norm = 0.0, rate = 0.0;
  double seconds = 0.0, tokens_per_second = 0.0, mfu = 0.0, memory = 0.0;
  std::vector<double> layer_losses;
};

struct ValidationRecord {
  std::int64_t step = 0;
  std::int64_t rows = 0;
  double kl = 0.0, agreement = 0.0, perplexity = 0.0, teacher_perplexity = 0.0;
  std::vector<std::pair<std::string, double>> kl_by_position;  // "4-7", nats
  std::vector<double> gate_means, far_shares;                  // by layer
};

struct EventRecord {
  std::int64_t step = 0;
  std::string text;
};

struct CheckpointRecord {
  std::int64_t step = 0;
  std::string stage;  // that continues, or "done"
  std::int64_t stage_step = 0;
  std::int64_t ranks = 0;
  double bytes = 0.0;
  double age = 0.0;  // seconds
};

struct RunRecord {
  std::filesystem::path directory;
  std::string configuration;  // config.toml
  std::vector<StepRecord> steps;
  std::vector<ValidationRecord> validations;
  std::vector<EventRecord> events;            // validations left out
  std::vector<CheckpointRecord> checkpoints;  // complete ones, newest first
  double age = 0.0;                           // seconds since metrics.jsonl grew

  bool is_finished() const { return !checkpoints.empty() && checkpoints.front().stage == "done"; }
};

// Reads a run that may be going on: lines that are not whole yet are left out. Throws Error for a
// directory that is no run's.
RunRecord read_run(const std::filesystem::path& directory);

}  // namespace bifocal
