// `bifocal train` and `bifocal pretrain`: from a configuration to checkpoints.
#include <filesystem>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "checkpoint/run_together.h"
#include "cli/commands.h"
#include "cli/config_options.h"
#include "cli/session.h"
#include "cli/stage_forecast.h"
#include "cli/train_watch.h"
#include "config/read.h"
#include "core/file.h"
#include "core/sha256.h"
#include "distill/align_stage.h"
#include "distill/logit_stage.h"
#include "hf/hf_config.h"
#include "parallel/rank_watch.h"
#include "plan/plan.h"
#include "plan/step_flop.h"
#include "train/run_lock.h"
#include "train/trainer.h"

namespace bifocal {

namespace {

namespace fs = std::filesystem;

MeshCounts counts_of(const Mesh& mesh) {
  return {.data = mesh.data_count(), .sequence = mesh.sequence_count()};
}

Weights::Placement student_placement(const RunConfig& config) {
  return config.memory.weights == "shard" ? Weights::Placement::sharded
                                          : Weights::Placement::replicated;
}

// Raised when other rows come of the same settings.
constexpr int kRowOrder = 2;

// What decides whether one run may continue another's checkpoint.
std::string identity_of(const RunConfig& config, const std::string& model_json) {
  std::string text = model_json + "\n" + config.teacher.path + "\n" + resolved_dtype(config);
  text += "\n" + canonical_text(data_mixture(config));
  text += fmt::format("{} {} {} {} {}",
                      kRowOrder,
                      config.data.row_tokens,
                      config.data.seed,
                      config.data.long_documents,
                      config.data.keep);
  return sha256_hex(text);
}

TrainSetup make_setup(const RunConfig& config, const ModelConfig& student) {
  BIFOCAL_REQUIRE(!config.run.directory.empty(),
                  "[train] wanted a run.directory for checkpoints and metrics, got none: set it");
  const std::string model_json = write_hf_config(student);
  return {.config = config,
          .config_text = to_toml(config),
          .model_config = model_json,
          .identity = identity_of(config, model_json)};
}

// The run directory, locked, and its resolved configuration, written by rank 0.
std::unique_ptr<RunLock> prepare_directory(const TrainSetup& setup, Communicator& world) {
  const fs::path directory = setup.config.run.directory;
  run_together(world, [&] {
    if (world.rank() == 0) {
      fs::create_directories(directory / "checkpoints");
    }
  });
  auto lock = std::make_unique<RunLock>(directory, world);
  run_together(world, [&] {
    if (world.rank() == 0) {
      write_file_atomically(directory / "config.toml", setup.config_text);
    }
  });
  return lock;
}

LogitLossOptions logit_options(const RunConfig& config, double ce_share) {
  return {.temperature = config.distill_extra.temperature,
          .ce_share = ce_share,
          .chunk = resolved_logit_chunk(config)};
}

StageRows stage_rows(const RowSource& source,
                     const RunConfig& config,
                     std::int64_t first,
                     std::int64_t steps) {
  return {.row = [&source](std::int64_t position) { return source.row(position); },
          .first = first,
          .per_step = config.data.rows_per_step,
          .steps = steps};
}

void describe_run(Console& console,
                  const TrainSetup& setup,
                  const Mesh& mesh,
                  const RowSource& rows) {
  console.print(fmt::format("mesh: {} rank(s) = data {} x sequence {}; {} rows of {} tokens a step",
                            mesh.world().size(),
                            mesh.data_count(),
                            mesh.sequence_count(),
                            setup.config.data.rows_per_step,
                            format_count(setup.config.data.row_tokens)));
  for (const SourceSize& source : rows.sources()) {
    console.print(fmt::format("data: {} {:.1f} % of the tokens, from {} tokens in {} documents",
                              source.name,
                              100.0 * source.weight,
                              format_count(source.tokens),
                              format_count(source.documents)));
  }
  console.print(fmt::format("configuration: {} (SHA-256 {})",
                            (fs::path(setup.config.run.directory) / "config.toml").string(),
                            sha256_hex(setup.config_text).substr(0, 12)));
}

void print_forecasts(Console& console, const std::vector<StageMemory>& stages) {
  for (const StageMemory& stage : stages) {
    console.print(describe(stage));
  }
}

RunEnd run_stages(Session& session,
                  const TrainSetup& setup,
                  const Mesh& mesh,
                  LoadedModel& student,
                  std::vector<TrainStage> stages) {
  Trainer trainer(
      session.context(), setup, mesh, student.weights(), std::move(stages), &session.host_memory());
  trainer.resume();
  return trainer.run();
}

// What the stages of `train` are made of. Outlives them.
struct StageParts {
  const RunConfig& config;
  Context context;
  const Mesh& mesh;
  const RowSource& rows;
  LoadedModel& student;
  LoadedModel& teacher;
  TeacherPlacement placement;
  RecomputePlan recompute;
  StageSteps steps;
};

TrainStage align_stage(const StageParts& parts) {
  return {.name = "align",
          .schedule = parts.config.align,
          .steps = parts.steps.align,
          .decays = false,
          .make = [&parts](std::int64_t first) -> std::unique_ptr<Stage> {
            return std::make_unique<AlignStage>(
                parts.context,
                parts.student.decoder(),
                parts.teacher.decoder(),
                parts.mesh,
                parts.placement,
                align_trainable(parts.config),
                stage_rows(parts.rows, parts.config, first, parts.steps.align));
          },
          .row_flop = row_flop(parts.rows, [&parts](std::span<const std::int64_t> documents) {
            return align_flop(parts.student.config(),
                              parts.teacher.config(),
                              documents,
                              align_trainable(parts.config) == AlignTrainable::mixer)
                .total();
          })};
}

TrainStage distill_stage(const StageParts& parts) {
  return {.name = "distill",
          .schedule = parts.config.distill,
          .steps = parts.steps.distill,
          .new_rate = parts.config.distill_extra.new_rate,
          .make = [&parts](std::int64_t first) -> std::unique_ptr<Stage> {
            return std::make_unique<LogitStage>(
                parts.context,
                parts.student.decoder(),
                &parts.teacher.decoder(),
                parts.mesh,
                parts.placement,
                parts.recompute,
                logit_options(parts.config, parts.config.distill_extra.ce_weight),
                stage_rows(parts.rows, parts.config, first, parts.steps.distill));
          },
          .row_flop = row_flop(parts.rows, [&parts](std::span<const std::int64_t> documents) {
            return step_flop(parts.student.config(), &parts.teacher.config(), documents).total();
          })};
}

RunEnd train(const RunConfig& config, const CommandContext& command, const std::string& until) {
  const StopSignals signals;
  BIFOCAL_REQUIRE(
      !config.teacher.path.empty(),
      "[train] wanted a teacher, got none: set teacher.path to a Hugging Face directory");
  Session session(config, watched_world(command, config), &command.watch.progress());
  phase(session.context(), "starting");
  const Mesh mesh(session.take_world(),
                  {.data = config.mesh.data, .sequence = config.mesh.sequence});
  require_rows_for_ranks(config, counts_of(mesh));
  const ModelConfig teacher_config = read_hf_config(config.teacher.path);
  const ModelConfig config_of_student = student_config(config);
  const StageSteps steps = choose_stages(config, config_of_student, teacher_config);
  BIFOCAL_REQUIRE(until.empty() || steps.align > 0,
                  "[train] wanted to run --until the end of align, but this run has no such stage: "
                  "leave --until out");
  const PlacementChoice choice =
      choose_placement(config, counts_of(mesh), teacher_config, steps.align);
  TrainSetup setup = make_setup(config, config_of_student);
  const std::unique_ptr<RunLock> lock = prepare_directory(setup, mesh.world());
  const RowSource rows = open_rows(config, teacher_config, Split::train);
  setup.rows = &rows;

  Console console(mesh.world().rank() == 0);
  describe_run(console, setup, mesh, rows);
  for (const std::string& note : {choice.note, steps.note}) {
    if (!note.empty()) {
      console.print(note);
    }
  }
  const std::vector<StageMemory> memory = forecast_stages(
      {.config = config,
       .student = config_of_student,
       .teacher = teacher_config,
       .teacher_storage = declared_storage(config.teacher.path, compute_type(config))},
      session,
      mesh);
  print_forecasts(console, memory);

  const Context context = session.context();
  phase(context, "loading the teacher");
  LoadedModel teacher = load_model(context,
                                   teacher_config,
                                   config.teacher.path,
                                   mesh.node(),
                                   {Weights::Placement::sharded, Region::teacher_weights, true},
                                   config);
  phase(context, "loading the student");
  LoadedModel student = load_model(context,
                                   config_of_student,
                                   student_directory(config),
                                   mesh.world(),
                                   {student_placement(config), Region::weights, false},
                                   config);

  setup.validate = make_validation(config, context, mesh, student, teacher);
  setup.signals = &signals;
  setup.until = until;
  const StageParts parts{
      config, context, mesh, rows, student, teacher, choice.work, last_recompute(memory), steps};
  std::vector<TrainStage> stages;
  if (steps.align > 0) {
    stages.push_back(align_stage(parts));
  }
  if (steps.distill > 0) {
    stages.push_back(distill_stage(parts));
  }
  return run_stages(session, setup, mesh, student, std::move(stages));
}

RunEnd pretrain(const RunConfig& config, const CommandContext& command) {
  const StopSignals signals;
  BIFOCAL_REQUIRE(config.evaluate.every == 0,
                  "[pretrain] wanted evaluate.every = 0, got {}: validation compares a student "
                  "with its teacher, which pretrain does not have",
                  config.evaluate.every);
  BIFOCAL_REQUIRE(
      !student_directory(config).empty(),
      "[pretrain] wanted a model, got none: set student.init to a directory with config.json");
  Session session(config, watched_world(command, config), &command.watch.progress());
  phase(session.context(), "starting");
  const Mesh mesh(session.take_world(),
                  {.data = config.mesh.data, .sequence = config.mesh.sequence});
  require_rows_for_ranks(config, counts_of(mesh));
  const ModelConfig model_config = student_config(config);
  TrainSetup setup = make_setup(config, model_config);
  const std::unique_ptr<RunLock> lock = prepare_directory(setup, mesh.world());
  const RowSource rows = open_rows(config, model_config, Split::train);
  setup.rows = &rows;
  setup.signals = &signals;
  Console console(mesh.world().rank() == 0);
  describe_run(console, setup, mesh, rows);

  const std::vector<StageMemory> memory =
      forecast_stages({.config = config, .student = model_config, .teacher = {}}, session, mesh);
  print_forecasts(console, memory);
  const Context context = session.context();
  phase(context, "loading the model");
  LoadedModel model = load_model(context,
                                 model_config,
                                 student_directory(config),
                                 mesh.world(),
                                 {student_placement(config), Region::weights, false},
                                 config);
  std::vector<TrainStage> stages;
  stages.push_back({.name = "pretrain",
                    .schedule = config.pretrain,
                    .steps = config.pretrain.steps,
                    .make = [&](std::int64_t first) -> std::unique_ptr<Stage> {
                      return std::make_unique<LogitStage>(
                          context,
                          model.decoder(),
                          nullptr,
                          mesh,
                          TeacherPlacement::look_ahead,
                          last_recompute(memory),
                          logit_options(config, 1.0),
                          stage_rows(rows, config, first, config.pretrain.steps));
                    },
                    .row_flop = row_flop(rows, [&](std::span<const std::int64_t> documents) {
                      return step_flop(model_config, nullptr, documents).total();
                    })});
  return run_stages(session, setup, mesh, model, std::move(stages));
}

void finish(RunEnd end, const CommandContext& context) {
  context.exit_code = end == RunEnd::stopped ? kExitAgain : 0;
}

}  // namespace

void add_train_command(CLI::App& app, const CommandContext& context) {
  CLI::App* command = app.add_subcommand(
      "train",
      "Align and distil a student from its teacher; resumes from its run directory. SIGTERM, "
      "SIGINT or SIGUSR1 to a rank: saves at the end of the step, exit code 75");
  const std::shared_ptr<ConfigOptions> options = ConfigOptions::add_to(*command);
  const auto until = std::make_shared<std::string>();
  command
      ->add_option(
          "--until", *until, "Save and end after this stage; the same command without it goes on")
      ->check(CLI::IsMember({"align"}));
  command->callback(
      [options, until, &context] { finish(train(options->resolve(), context, *until), context); });
}

void add_pretrain_command(CLI::App& app, const CommandContext& context) {
  CLI::App* command = app.add_subcommand(
      "pretrain",
      "Train a model by next-token loss, from student.init (random weights where it has none); "
      "resumes and ends like train");
  const std::shared_ptr<ConfigOptions> options = ConfigOptions::add_to(*command);
  command->callback(
      [options, &context] { finish(pretrain(options->resolve(), context), context); });
}

}  // namespace bifocal
