// A run that stops and continues is the run that never stopped: weights, moments, data position,
// schedules and metrics.
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint.h"
#include "checkpoint/step_directory.h"
#include "distill/align_stage.h"
#include "distill/logit_stage.h"
#include "support/compare.h"
#include "support/mpi_world.h"
#include "support/shared_directory.h"
#include "support/tiny_model.h"
#include "train/trainer.h"

namespace bifocal::test {

namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kAlignSteps = 4;
constexpr std::int64_t kDistillSteps = 6;
constexpr std::int64_t kSteps = kAlignSteps + kDistillSteps;

// Rows of a step, which every mesh of these ranks divides.
std::int64_t rows_per_step() {
  return test_world().size() == 3 ? 3 : 4;
}

struct RunOptions {
  DType dtype = DType::f32;
  std::int64_t every = 3;  // steps between checkpoints
  bool stage_ends = true;  // and at the ends of stages
  std::uint64_t seed = 2;  // of the student's first weights
  std::string identity = "teacher, student and data";
  std::string first_stage = "align";
  bool asynchronous = true;
  std::string until;
};

// Everything a process makes anew when it starts: two stages of a bifocal student.
class Process {
 public:
  Process(const fs::path& directory,
          std::unique_ptr<Communicator> world,
          const MeshCounts& counts,
          const RunOptions& options)
      : device_(options.dtype),
        mesh_(std::move(world), counts),
        teacher_(device_.context(), tiny_teacher(), mesh_.world(), Weights::Placement::sharded, 1),
        student_(device_.context(),
                 tiny_student(tiny_teacher(), tiny_students(tiny_teacher())[2].mixers),
                 mesh_.world(),
                 Weights::Placement::replicated,
                 options.seed),
        trainer_(device_.context(),
                 setup(directory, options),
                 mesh_,
                 student_.weights(),
                 {align(options.first_stage), distill()}) {}

  void run_all() {
    trainer_.resume();
    trainer_.run();
  }

  Trainer& trainer() { return trainer_; }

 private:
  static TrainSetup setup(const fs::path& directory, const RunOptions& options) {
    TrainSetup setup{
        .config = {}, .config_text = "[run]\n", .model_config = "{}", .identity = options.identity};
    setup.config.run.directory = directory.string();
    setup.config.data.rows_per_step = rows_per_step();
    setup.config.data.row_tokens = 23;
    setup.config.checkpoint.every = options.every;
    setup.config.checkpoint.asynchronous = options.asynchronous;
    setup.config.checkpoint.keep = 0;
    setup.config.checkpoint.stage_ends = options.stage_ends;
    setup.config.optimizer.eps = 1e-4;
    setup.until = options.until;
    return setup;
  }

  StageRows rows(std::int64_t first, std::int64_t steps) const {
    StageRows rows = stage_rows(
        [](std::int64_t position) { return random_row(position, 23, 53); }, rows_per_step(), steps);
    rows.first = first;
    return rows;
  }

  TrainStage align(const std::string& name) {
    return {.name = name,
            .schedule = {.rate = 1e-2, .final_rate = 1e-5, .schedule = "cosine", .warmup = 0.3},
            .steps = kAlignSteps,
            .make = [this](std::int64_t first) -> std::unique_ptr<Stage> {
              return std::make_unique<AlignStage>(device_.context(),
                                                  student_.decoder(),
                                                  teacher_.decoder(),
                                                  mesh_,
                                                  TeacherPlacement::look_ahead,
                                                  AlignTrainable::new_tensors,
                                                  rows(first, kAlignSteps));
            }};
  }

  TrainStage distill() {
    return {.name = "distill",
            .schedule = {.rate = 1e-3, .final_rate = 1e-4, .schedule = "cosine", .warmup = 0.2},
            .steps = kDistillSteps,
            .new_rate = 2e-3,
            .make = [this](std::int64_t first) -> std::unique_ptr<Stage> {
              return std::make_unique<LogitStage>(device_.context(),
                                                  student_.decoder(),
                                                  &teacher_.decoder(),
                                                  mesh_,
                                                  TeacherPlacement::look_ahead,
                                                  Recompute::none,
                                                  LogitLossOptions{.ce_share = 0.2, .chunk = 16},
                                                  rows(first, kDistillSteps));
            }};
  }

  Device device_;
  Mesh mesh_;
  TinyModel teacher_;
  TinyModel student_;
  Trainer trainer_;
};

void run(const fs::path& directory, const MeshCounts& counts, const RunOptions& options) {
  Process(directory, test_world().split(0), counts, options).run_all();
}

fs::path step_of(const fs::path& directory, std::int64_t step) {
  return step_path(directory / "checkpoints", step);
}

// What a run leaves that is killed after step `cut`, metrics of lost steps included.
void copy_run(const fs::path& from, const fs::path& to, std::int64_t cut) {
  if (test_world().rank() == 0) {
    fs::copy(from, to, fs::copy_options::recursive | fs::copy_options::copy_symlinks);
    for (std::int64_t step = cut + 1; step <= kSteps; ++step) {
      fs::remove_all(step_of(to, step));
    }
  }
  test_world().barrier();
}

// Every tensor of a checkpoint, weights and moments.
NamedValues contents(const fs::path& checkpoint) {
  const ParameterTable table(tiny_student(tiny_teacher(), tiny_students(tiny_teacher())[2].mixers));
  NamedValues values;
  std::vector<ShardedTensor> tensors;
  for (const Parameter& parameter : table.parameters()) {
    for (const char* prefix : {"", "optimizer.first.", "optimizer.second."}) {
      std::vector<double>& whole = values[prefix + parameter.name];
      whole.resize(static_cast<std::size_t>(parameter.size()));
      tensors.push_back({.name = prefix + parameter.name,
                         .global = parameter.shape,
                         .begin = 0,
                         .end = parameter.size(),
                         .data = {whole.data(), DType::f64, {parameter.size()}}});
    }
  }
  load_checkpoint(checkpoint, tensors, *make_self_communicator());
  return values;
}

// Lines of steps, less what a clock says.
std::vector<nlohmann::json> metrics(const fs::path& directory) {
  std::ifstream file(directory / "metrics.jsonl");
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(file, line);) {
    nlohmann::json object = nlohmann::json::parse(line);
    if (object.contains("event")) {
      continue;
    }
    for (const char* differs : {"seconds", "tokens_per_second", "memory_bytes"}) {
      object.erase(differs);
    }
    lines.push_back(std::move(object));
  }
  return lines;
}

void expect_same_run(const fs::path& got, const fs::path& want, std::int64_t cut) {
  if (test_world().rank() == 0) {
    EXPECT_EQ(metrics(got), metrics(want));
    EXPECT_EQ(metrics(got).size(), static_cast<std::size_t>(kSteps));
    std::int64_t compared = 0;
    for (std::int64_t step = cut + 1; step <= kSteps; ++step) {
      if (!fs::exists(step_of(want, step))) {
        continue;
      }
      ++compared;
      // Float32 values as doubles: equal where their bits are, signs of zero aside.
      EXPECT_EQ(contents(step_of(got, step)), contents(step_of(want, step))) << "step " << step;
      const CheckpointInfo a = read_checkpoint_info(step_of(got, step));
      const CheckpointInfo b = read_checkpoint_info(step_of(want, step));
      EXPECT_EQ(a.stage, b.stage);
      EXPECT_EQ(a.stage_step, b.stage_step);
      EXPECT_EQ(a.next_row, b.next_row);
    }
    EXPECT_GT(compared, 0);
  }
  test_world().barrier();
}

void expect_continues_from(const std::vector<std::int64_t>& cuts,
                           const MeshCounts& counts,
                           const RunOptions& options) {
  const SharedDirectory directory;
  const fs::path whole = directory.path() / "whole";
  if (test_world().rank() == 0) {
    fs::create_directories(whole);
  }
  test_world().barrier();
  run(whole, counts, options);
  for (const std::int64_t cut : cuts) {
    SCOPED_TRACE(
        fmt::format("mesh {} x {}, stopped after step {}", counts.data, counts.sequence, cut));
    const fs::path parts = directory.path() / ("cut_" + std::to_string(cut));
    copy_run(whole, parts, cut);
    RunOptions later = options;
    later.seed = 99;  // whatever the weights were before resuming
    run(parts, counts, later);
    expect_same_run(parts, whole, cut);
  }
}

TEST(Resume, ATrialLeavesMetricsAlone) {
  const SharedDirectory directory;
  run(directory.path(), {.data = 0, .sequence = 1}, {.every = 0, .stage_ends = false});
  if (test_world().rank() == 0) {
    EXPECT_EQ(metrics(directory.path()).size(), static_cast<std::size_t>(kSteps));
    EXPECT_FALSE(fs::exists(directory.path() / "checkpoints"));
  }
}

TEST(Resume, TenStepsAreFiveAndFiveBitForBit) {
  expect_continues_from({5}, {.data = 0, .sequence = 1}, {.every = 5});
}

// Inside align, between the stages, and inside distill with moments to compare at step 9.
TEST(Resume, ContinuesInsideAndBetweenStagesBitForBit) {
  const std::vector<MeshCounts> meshes = meshes_of(test_world().size());
  const MeshCounts counts = meshes[meshes.size() / 2];  // on 4 ranks both axes
  expect_continues_from({3, kAlignSteps, 6}, counts, {.every = 3});
}

// Also where the ends of stages write no checkpoints.
TEST(Resume, AStageAtATimeIsTheWholeRun) {
  const MeshCounts counts{.data = 1, .sequence = 0};
  for (const bool stage_ends : {true, false}) {
    const SharedDirectory directory;
    const fs::path whole = directory.path() / "whole";
    const fs::path parts = directory.path() / "parts";
    if (test_world().rank() == 0) {
      fs::create_directories(whole);
      fs::create_directories(parts);
    }
    test_world().barrier();
    RunOptions options{.every = 3, .stage_ends = stage_ends};
    run(whole, counts, options);
    options.until = "align";
    for (int time = 0; time < 2; ++time) {  // the second one has nothing to do
      run(parts, counts, options);
      EXPECT_TRUE(fs::exists(step_of(parts, kAlignSteps)));
      EXPECT_FALSE(fs::exists(step_of(parts, kAlignSteps + 1)));
      if (test_world().rank() == 0) {
        EXPECT_EQ(metrics(parts).size(), static_cast<std::size_t>(kAlignSteps));
      }
      test_world().barrier();
    }
    options.until = "";
    run(parts, counts, options);
    expect_same_run(parts, whole, 0);
    options.until = "pretrain";
    EXPECT_THROW(run(parts, counts, options), Error);
  }
}

TEST(Resume, CheckpointsOnTheWayChangeNothing) {
  const SharedDirectory directory;
  const MeshCounts counts{.data = 1, .sequence = 0};
  for (const std::int64_t every : {0, 2}) {
    const fs::path path = directory.path() / std::to_string(every);
    if (test_world().rank() == 0) {
      fs::create_directories(path);
    }
    test_world().barrier();
    run(path, counts, {.every = every});
  }
  if (test_world().rank() == 0) {
    EXPECT_EQ(metrics(directory.path() / "0"), metrics(directory.path() / "2"));
    EXPECT_EQ(contents(step_of(directory.path() / "0", kSteps)),
              contents(step_of(directory.path() / "2", kSteps)));
  }
}

TEST(Resume, StepsBesideASaveLeaveItsStateAlone) {
  const SharedDirectory directory;
  const MeshCounts counts{.data = 0, .sequence = 1};
  for (const bool asynchronous : {false, true}) {
    const fs::path path = directory.path() / (asynchronous ? "beside" : "between");
    if (test_world().rank() == 0) {
      fs::create_directories(path);
    }
    test_world().barrier();
    run(path, counts, {.every = 1, .asynchronous = asynchronous});
  }
  if (test_world().rank() != 0) {
    return;
  }
  for (std::int64_t step = 1; step <= kSteps; ++step) {
    EXPECT_EQ(contents(step_of(directory.path() / "beside", step)),
              contents(step_of(directory.path() / "between", step)))
        << "step " << step;
  }
}

TEST(Resume, EverySaveIsReportedOnceItIsComplete) {
  const SharedDirectory directory;
  run(directory.path(), {.data = 0, .sequence = 1}, {.every = 1});
  if (test_world().rank() != 0) {
    return;
  }
  std::ifstream file(directory.path() / "metrics.jsonl");
  std::int64_t saved = 0;
  for (std::string line; std::getline(file, line);) {
    const nlohmann::json object = nlohmann::json::parse(line);
    if (object.value("event", "") != "checkpoint") {
      continue;
    }
    ++saved;
    EXPECT_EQ(object["saved_step"], saved);
    EXPECT_GE(object["step"], saved);
    EXPECT_GT(object["bytes"], 0);
    EXPECT_GT(object["seconds"], 0.0);
    EXPECT_GE(object["delay_seconds"], 0.0);
  }
  EXPECT_EQ(saved, kSteps);
}

TEST(Resume, RowsAreConsumedInOrderOverBothStages) {
  const SharedDirectory directory;
  run(directory.path(), {.data = 0, .sequence = 1}, {.every = 1});
  if (test_world().rank() != 0) {
    return;
  }
  const auto lines = metrics(directory.path());
  ASSERT_EQ(lines.size(), static_cast<std::size_t>(kSteps));
  for (std::int64_t step = 0; step < kSteps; ++step) {
    double kept = 0.0;
    for (std::int64_t i = 0; i < rows_per_step(); ++i) {
      kept += count_kept(random_row(step * rows_per_step() + i, 23, 53)).kept;
    }
    const nlohmann::json& line = lines[static_cast<std::size_t>(step)];
    EXPECT_EQ(line["kept_tokens"].get<double>(), kept) << "step " << step + 1;
    EXPECT_EQ(line["step"].get<std::int64_t>(), step + 1);
    EXPECT_EQ(line["stage"], step < kAlignSteps ? "align" : "distill");
    const CheckpointInfo info = read_checkpoint_info(step_of(directory.path(), step + 1));
    EXPECT_EQ(info.next_row, (step + 1) * rows_per_step());
    EXPECT_EQ(info.step, step + 1);
  }
}

TEST(Resume, AFinishedRunHasNothingLeftToDo) {
  const SharedDirectory directory;
  const MeshCounts counts{.data = 0, .sequence = 1};
  run(directory.path(), counts, {});
  std::vector<nlohmann::json> before;
  if (test_world().rank() == 0) {
    before = metrics(directory.path());
  }
  run(directory.path(), counts, {});
  if (test_world().rank() == 0) {
    EXPECT_EQ(metrics(directory.path()), before);
  }
}

// Losses of two runs, whose sums are formed in another order from step `cut` on.
void expect_equal_losses(const fs::path& got, const fs::path& want) {
  const auto a = metrics(got);
  const auto b = metrics(want);
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i]["kept_tokens"], b[i]["kept_tokens"]);
    const double loss = b[i]["loss"].get<double>();
    EXPECT_NEAR(a[i]["loss"].get<double>(), loss, 1e-9 * loss) << "step " << i + 1;
  }
}

TEST(Resume, AnotherMeshContinuesWithTheSameLosses) {
  const std::vector<MeshCounts> meshes = meshes_of(test_world().size());
  const RunOptions options{.dtype = DType::f64, .every = 3};
  const SharedDirectory directory;
  const fs::path whole = directory.path() / "whole";
  if (test_world().rank() == 0) {
    fs::create_directories(whole);
  }
  test_world().barrier();
  run(whole, meshes.front(), options);
  for (const MeshCounts& counts : meshes) {
    const fs::path parts = directory.path() / fmt::format("{}x{}", counts.data, counts.sequence);
    copy_run(whole, parts, 6);
    run(parts, counts, options);
    if (test_world().rank() == 0) {
      expect_equal_losses(parts, whole);
    }
    test_world().barrier();
  }
}

TEST(Resume, AnotherNumberOfRanksContinuesWithTheSameLosses) {
  const RunOptions options{.dtype = DType::f64, .every = 3};
  const MeshCounts all{.data = 1, .sequence = 0};
  const MeshCounts one{.data = 1, .sequence = 1};
  const SharedDirectory directory;
  const fs::path whole = directory.path() / "whole";
  const fs::path alone = directory.path() / "alone";
  const fs::path parts = directory.path() / "parts";
  if (test_world().rank() == 0) {
    fs::create_directories(whole);
  }
  test_world().barrier();
  run(whole, all, options);
  copy_run(whole, alone, 3);
  if (test_world().rank() == 0) {
    Process(alone, make_self_communicator(), one, options).run_all();
  }
  test_world().barrier();
  copy_run(alone, parts, 6);  // one rank's checkpoint, back to all of them
  run(parts, all, options);
  if (test_world().rank() == 0) {
    expect_equal_losses(alone, whole);
    expect_equal_losses(parts, whole);
  }
}

TEST(Resume, RefusesAnotherModelsCheckpointAndStagesItDoesNotHave) {
  const SharedDirectory directory;
  const MeshCounts counts{.data = 1, .sequence = 0};
  run(directory.path(), counts, {.every = 3});
  if (test_world().rank() == 0) {
    for (std::int64_t step = 4; step <= kSteps; ++step) {
      fs::remove_all(step_of(directory.path(), step));
    }
  }
  test_world().barrier();
  const auto resume = [&](const RunOptions& options) {
    Process(directory.path(), test_world().split(0), counts, options).trainer().resume();
  };
  EXPECT_THROW(resume({.identity = "another teacher"}), Error);
  EXPECT_THROW(resume({.first_stage = "pretrain"}), Error);
  EXPECT_NO_THROW(resume({}));
}

}  // namespace

}  // namespace bifocal::test
