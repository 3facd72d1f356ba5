// `bifocal bench step`: whole training steps of each stage on random rows, by the objects that
// `train` uses, and what their parts take.
#include <algorithm>
#include <map>
#include <memory>
#include <numeric>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "cli/bench.h"
#include "cli/bench_command.h"
#include "cli/config_options.h"
#include "cli/session.h"
#include "cli/stage_forecast.h"
#include "core/log.h"
#include "distill/align_stage.h"
#include "distill/logit_stage.h"
#include "plan/step_flop.h"
#include "train/optimizer.h"

namespace bifocal {

namespace {

struct StepOptions {
  BenchSettings settings;
  std::string model = "qwen3-4b";
  std::int64_t documents = 0;
  std::int64_t rows = 1;  // of each data rank
  std::vector<std::string> stages;
};

// Where the time of a step goes, in the order of a step.
constexpr const char* kParts[] = {"rows",
                                  "teacher forward",
                                  "student forward",
                                  "head and loss",
                                  "student backward",
                                  "gradients",
                                  "optimizer"};

class StepBench {
 public:
  StepBench(const RunConfig& config, const StepOptions& options, Session& session)
      : config_(config),
        options_(options),
        session_(session),
        mesh_(session.take_world(), {.data = config.mesh.data, .sequence = config.mesh.sequence}),
        timeline_(session.context().stream),
        context_(session.context()),
        teacher_config_(bench_model(options.model)),
        student_config_(teacher_config_),
        documents_(document_lengths(config.data.row_tokens, options.documents)),
        report_(options.settings, "bench step", mesh_.world().rank() == 0) {
    context_.timeline = &timeline_;
    config_.data.rows_per_step = options.rows * mesh_.data_count();
    student_config_.mixers = make_mixers(
        config.student.preset, config.student.budget, config.student.mixers, teacher_config_);
  }

  void run_all();

 private:
  void run_stage(StageKind kind);
  void run_step(Stage& stage, StageKind kind, std::int64_t step);
  std::unique_ptr<Stage> make_stage(StageKind kind);
  void report_stage(StageKind kind);
  OpCost cost_of_row(StageKind kind) const;
  std::string label(const std::string& first) const;

  // Under look-ahead the teacher runs once for as many rows as ranks share one: so many steps make
  // one sample.
  std::int64_t cycle() const {
    const std::int64_t ranks = mesh_.sequence_count();
    return placement_ == TeacherPlacement::look_ahead ? ranks / std::gcd(ranks, options_.rows) : 1;
  }

  std::int64_t warmups() const {
    return (options_.settings.warmups + cycle() - 1) / cycle() * cycle();
  }

  std::int64_t steps() const { return warmups() + options_.settings.repeats * cycle(); }

  RunConfig config_;
  const StepOptions& options_;
  Session& session_;
  Mesh mesh_;
  Timeline timeline_;
  Context context_;
  ModelConfig teacher_config_;
  ModelConfig student_config_;
  std::vector<std::int64_t> documents_;
  BenchReport report_;
  std::unique_ptr<LoadedModel> teacher_, student_;
  std::unique_ptr<Gradients> gradients_;
  std::unique_ptr<Optimizer> optimizer_;
  TeacherPlacement placement_ = TeacherPlacement::look_ahead;
  RecomputePlan recompute_;
  std::map<std::string, std::vector<double>> parts_;  // seconds of each counted step
  std::vector<double> seconds_;
};

std::unique_ptr<Stage> StepBench::make_stage(StageKind kind) {
  StageRows rows{.row =
                     [this](std::int64_t position) {
                       return random_bench_row(documents_,
                                               teacher_config_.vocabulary,
                                               static_cast<std::uint64_t>(position));
                     },
                 .per_step = config_.data.rows_per_step,
                 .steps = steps()};
  if (kind == StageKind::align) {
    return std::make_unique<AlignStage>(context_,
                                        student_->decoder(),
                                        teacher_->decoder(),
                                        mesh_,
                                        placement_,
                                        align_trainable(config_),
                                        std::move(rows));
  }
  const LogitLossOptions loss{.temperature = config_.distill_extra.temperature,
                              .ce_share = config_.distill_extra.ce_weight,
                              .chunk = resolved_logit_chunk(config_)};
  return std::make_unique<LogitStage>(context_,
                                      student_->decoder(),
                                      &teacher_->decoder(),
                                      mesh_,
                                      placement_,
                                      recompute_,
                                      loss,
                                      std::move(rows));
}

// As Trainer::run_stage does it.
void StepBench::run_step(Stage& stage, StageKind kind, std::int64_t step) {
  const StageConfig& schedule = kind == StageKind::align ? config_.align : config_.distill;
  timeline_.clear();
  phase(context_, "gradients");
  gradients_->clear();
  const StepResult result = stage.run_step(step, *gradients_);
  phase(context_, "optimizer");
  optimizer_->update(
      {.trains = [&](const Parameter& p) { return stage.trains(p); },
       .rate = [&](const Parameter&) { return schedule.rate; },
       .decays = [&](const Parameter& p) { return kind == StageKind::distill && p.decays; },
       .clip_scope = stage.clip_scope(),
       .clip = schedule.clip,
       .unit_factors = result.unit_factors,
       .unit_squares = result.unit_squares,
       .number = step + 1},
      *gradients_);
  const std::map<std::string, double> phases = timeline_.take();
  if (step < warmups()) {
    return;
  }
  double all = 0.0;
  for (const auto& [name, seconds] : phases) {
    parts_[name].push_back(seconds);
    all += seconds;
  }
  seconds_.push_back(all);
}

OpCost StepBench::cost_of_row(StageKind kind) const {
  const StepFlop flop = kind == StageKind::align
                            ? align_flop(student_config_,
                                         teacher_config_,
                                         documents_,
                                         config_.align_extra.trainable == "mixer")
                            : step_flop(student_config_, &teacher_config_, documents_);
  return {.flop = flop.total()};
}

// "step_bifocal_40960", "step_bifocal_packed", and on more ranks "step_bifocal_40960_sequence2".
std::string StepBench::label(const std::string& first) const {
  std::string text =
      fmt::format("{}_{}_{}",
                  first,
                  student_label(config_.student.preset),
                  documents_.size() > 1 ? "packed" : std::to_string(config_.data.row_tokens));
  for (const auto& [name, count] :
       {std::pair{"_data", mesh_.data_count()}, std::pair{"_sequence", mesh_.sequence_count()}}) {
    text += count > 1 ? fmt::format("{}{}", name, count) : "";
  }
  return text;
}

// Means of `count` values that follow each other.
std::vector<double> means_of(const std::vector<double>& values, std::int64_t count) {
  std::vector<double> means;
  const auto length = static_cast<std::ptrdiff_t>(count);
  for (auto at = values.begin(); values.end() - at >= length; at += length) {
    means.push_back(std::accumulate(at, at + length, 0.0) / static_cast<double>(count));
  }
  return means;
}

void StepBench::report_stage(StageKind kind) {
  seconds_ = means_of(seconds_, cycle());
  for (auto& [part, seconds] : parts_) {
    seconds = means_of(seconds, cycle());
  }
  const std::string name = label(kind == StageKind::align ? "align" : "step");
  const auto rows = static_cast<double>(options_.rows);
  // A rank's share of the group's row.
  const double share = rows / mesh_.sequence_count();
  const OpCost cost{.flop = share * cost_of_row(kind).flop};
  const double floor = floor_seconds(cost, options_.settings.rates());
  report_.add(time_row(name, "s", seconds_, cost, floor));
  for (const char* part : kParts) {
    const auto found = parts_.find(part);
    if (found == parts_.end()) {
      continue;
    }
    std::string part_name = fmt::format("{}_{}", name, part);
    std::ranges::replace(part_name, ' ', '_');
    report_.add(time_row(part_name, "s", found->second));
  }
  if (kind == StageKind::distill && mesh_.world().size() == 1) {
    const StepFlop flop = step_flop(student_config_, &teacher_config_, documents_);
    const OpCost forward{.flop = rows * flop.teacher_forward};
    report_.add(time_row(documents_.size() > 1 ? "teacher_forward_packed" : "teacher_forward",
                         "s",
                         parts_.at("teacher forward"),
                         forward,
                         floor_seconds(forward, options_.settings.rates())));
  }
  const double seconds = median(seconds_);
  const auto [least, most] = std::ranges::minmax(seconds_);
  const double tokens = rows * mesh_.data_count() * static_cast<double>(config_.data.row_tokens);
  const auto samples = static_cast<std::int64_t>(seconds_.size());
  report_.add({.name = name + "_rate",
               .unit = "tokens/s",
               .ours = tokens / seconds,
               .low = tokens / most,
               .high = tokens / least,
               .samples = samples});
  const double peak = options_.settings.rates().flop;
  report_.add({.name = name + "_mfu",
               .unit = "share",
               .ours = cost.flop / seconds / peak,
               .low = cost.flop / most / peak,
               .high = cost.flop / least / peak,
               .samples = samples});
}

void StepBench::run_stage(StageKind kind) {
  parts_.clear();
  seconds_.clear();
  optimizer_->reset();
  {
    const std::unique_ptr<Stage> stage = make_stage(kind);
    for (std::int64_t step = 0; step < steps(); ++step) {
      run_step(*stage, kind, step);
    }
  }
  report_stage(kind);
}

void StepBench::run_all() {
  const MeshCounts counts{.data = mesh_.data_count(), .sequence = mesh_.sequence_count()};
  require_rows_for_ranks(config_, counts);
  require_rows_in_model(config_, teacher_config_);
  const auto wants = [&](StageKind kind) {
    return options_.stages.empty() ||
           std::ranges::find(options_.stages, name_of(kind)) != options_.stages.end();
  };
  config_.align.steps = wants(StageKind::align) ? 1 : 0;
  config_.distill.steps = wants(StageKind::distill) ? 1 : 0;
  const StageSteps stage_steps = choose_stages(config_, student_config_, teacher_config_);
  placement_ = choose_placement(config_, counts, teacher_config_, stage_steps.align).work;
  const std::vector<StageMemory> planned = forecast_stages({.config = config_,
                                                            .student = student_config_,
                                                            .teacher = teacher_config_,
                                                            .teacher_storage = context_.dtype},
                                                           session_,
                                                           mesh_);
  recompute_ = last_recompute(planned);
  for (const StageMemory& stage : planned) {
    report_.note(describe(stage));
  }
  report_.note(
      fmt::format("{} to {}: rows of {} tokens in {} document(s), {} a step, {}, recompute {}",
                  options_.model,
                  config_.student.preset,
                  format_count(config_.data.row_tokens),
                  documents_.size(),
                  config_.data.rows_per_step,
                  name_of(context_.dtype),
                  name_of(recompute_.level)));
  const auto load =
      [&](const ModelConfig& model, Communicator& group, const ModelPlacement& placement) {
        const std::filesystem::path none;
        return std::unique_ptr<LoadedModel>(
            new LoadedModel(load_model(context_, model, none, group, placement, config_)));
      };
  teacher_ = load(
      teacher_config_, mesh_.node(), {Weights::Placement::sharded, Region::teacher_weights, true});
  student_ = load(student_config_,
                  mesh_.world(),
                  {config_.memory.weights == "shard" ? Weights::Placement::sharded
                                                     : Weights::Placement::replicated,
                   Region::weights,
                   false});
  gradients_ = std::make_unique<Gradients>(context_, student_->table(), mesh_.world());
  optimizer_ = std::make_unique<Optimizer>(
      context_, student_->weights(), config_.optimizer, &session_.host_memory());
  if (stage_steps.align > 0) {
    run_stage(StageKind::align);
  }
  if (stage_steps.distill > 0) {
    run_stage(StageKind::distill);
  }
  const Memory& memory = context_.memory;
  const auto bytes_row = [&](const std::string& name, std::size_t bytes) {
    const auto value = static_cast<double>(bytes);
    report_.add({.name = name, .unit = "bytes", .ours = value, .low = value, .high = value});
  };
  for (std::size_t index = 0; index < static_cast<std::size_t>(Region::count); ++index) {
    const auto region = static_cast<Region>(index);
    if (memory.peak_bytes(region) > 0) {
      std::string name = fmt::format("{}_{}", label("memory"), name_of(region));
      std::ranges::replace(name, ' ', '_');
      bytes_row(name, memory.peak_bytes(region));
    }
  }
  bytes_row(label("memory"), memory.peak_bytes());
}

}  // namespace

void add_bench_step_command(CLI::App& bench, const CommandContext& context) {
  CLI::App* command = bench.add_subcommand(
      "step", "Whole training steps on random rows and weights, and what their parts take");
  auto options = std::make_shared<StepOptions>();
  options->settings.warmups = 2;
  options->settings.repeats = 5;
  const std::shared_ptr<ConfigOptions> config = ConfigOptions::add_to(*command);
  command
      ->add_option("--model",
                   options->model,
                   "Teacher's shape: qwen3-4b, qwen3.5-4b, tiny, or the path of a config.json")
      ->capture_default_str();
  command->add_option("--documents", options->documents, "Tokens of each document; 0: one document")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  command->add_option("--rows", options->rows, "Rows of a step for each data rank")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--stage", options->stages, "Stages to run (default: both)")
      ->check(CLI::IsMember({"align", "distill"}));
  options->settings.add_to(*command);
  command->callback([options, config, &context] {
    const RunConfig run = config->resolve();
    Session session(run, watched_world(context, run));
    StepBench(run, *options, session).run_all();
  });
}

}  // namespace bifocal
