// Steps whose loss or gradient is not finite on one rank: skipped by all of them, as if they had
// not been, and too many in a row end the run. A signal to one rank: all save and end.
#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "checkpoint/step_directory.h"
#include "distill/logit_stage.h"
#include "ops/fill.h"
#include "support/compare.h"
#include "support/error_of.h"
#include "support/mpi_world.h"
#include "support/shared_directory.h"
#include "support/tiny_model.h"
#include "train/trainer.h"

namespace bifocal::test {

namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kRowTokens = 19;
constexpr std::int64_t kVocabulary = 53;

enum class Poison { loss, gradient };

struct RunOptions {
  std::int64_t steps = 5;
  std::set<std::int64_t> poisoned;  // steps of the stage, from 0
  std::set<std::int64_t> left_out;  // rows of these steps are not there at all
  Poison poison = Poison::loss;
  std::int64_t max_skipped = 3;
  std::int64_t signal_in = -1;  // step in which the last rank gets SIGUSR1
};

// Stage 2 in which the last rank computes what is not finite, or gets a signal.
class PoisonedStage : public LogitStage {
 public:
  PoisonedStage(const RunOptions& options,
                Context context,
                Decoder& student,
                Decoder& teacher,
                const Mesh& mesh,
                StageRows rows)
      : LogitStage(context,
                   student,
                   &teacher,
                   mesh,
                   TeacherPlacement::look_ahead,
                   Recompute::none,
                   {.chunk = 16},
                   std::move(rows)),
        options_(options),
        last_unit_(static_cast<std::int64_t>(student.weights().table().units().size()) - 1) {}

 protected:
  void queue_step(std::int64_t step, Gradients& gradients, const TensorView& sums) override {
    LogitStage::queue_step(step, gradients, sums);
    const bool is_mine = mesh().world().rank() + 1 == mesh().world().size();
    if (is_mine && step == options_.signal_in) {
      std::raise(SIGUSR1);
    }
    if (!options_.poisoned.contains(step)) {
      return;
    }
    if (options_.poison == Poison::loss) {
      if (is_mine) {
        sums.as<double>()[0] = std::numeric_limits<double>::quiet_NaN();
      }
      return;
    }
    const TensorView whole = gradients.open(last_unit_);
    if (is_mine) {
      bifocal::run(context().stream,
                   Fill{.x = whole, .value = std::numeric_limits<double>::infinity()});
    }
    gradients.close(last_unit_);
  }

 private:
  RunOptions options_;
  std::int64_t last_unit_;
};

std::int64_t rows_per_step() {
  return test_world().size() == 3 ? 3 : 4;
}

// Runs the stage from what the directory holds. Constant rates, so that a step's place in the
// schedule does not matter.
RunEnd run(const fs::path& directory, const RunOptions& options) {
  const StopSignals signals;
  Device device(DType::f32);
  const Mesh mesh(test_world().split(0), {.data = 0, .sequence = test_world().size() > 3 ? 2 : 1});
  const ModelConfig config = tiny_teacher();
  TinyModel teacher(device.context(), config, mesh.world(), Weights::Placement::sharded, 1);
  TinyModel student(device.context(),
                    tiny_student(config, tiny_students(config)[2].mixers),
                    mesh.world(),
                    Weights::Placement::replicated,
                    2);
  std::vector<std::int64_t> taken;  // by step, whose rows it reads
  for (std::int64_t step = 0; static_cast<std::int64_t>(taken.size()) < options.steps; ++step) {
    if (!options.left_out.contains(step)) {
      taken.push_back(step);
    }
  }
  const auto row = [&](std::int64_t position) {
    const std::int64_t step = taken.at(static_cast<std::size_t>(position / rows_per_step()));
    return random_row(step * rows_per_step() + position % rows_per_step(), kRowTokens, kVocabulary);
  };
  TrainSetup setup{
      .config = {}, .config_text = "[run]\n", .model_config = "{}", .identity = "skips"};
  setup.signals = &signals;
  setup.config.run.directory = directory.string();
  setup.config.run.max_skipped = options.max_skipped;
  setup.config.data.rows_per_step = rows_per_step();
  setup.config.data.row_tokens = kRowTokens;
  setup.config.checkpoint = {.every = options.signal_in < 0 ? 1 : 0, .keep = 0};
  setup.config.optimizer.eps = 1e-4;
  TrainStage stage;
  stage.name = "distill";
  stage.schedule.rate = 1e-3;
  stage.schedule.schedule = "constant";
  stage.schedule.warmup = 0.0;
  stage.steps = options.steps;
  stage.make = [&](std::int64_t first) -> std::unique_ptr<Stage> {
    StageRows rows = stage_rows(row, rows_per_step(), options.steps);
    rows.first = first;
    return std::make_unique<PoisonedStage>(
        options, device.context(), student.decoder(), teacher.decoder(), mesh, rows);
  };
  Trainer trainer(device.context(), setup, mesh, student.weights(), {stage});
  trainer.resume();
  return trainer.run();
}

void make_directory(const fs::path& path) {
  if (test_world().rank() == 0) {
    fs::create_directories(path);
  }
  test_world().barrier();
}

// The bytes of this rank's own file: its weights and moments.
NamedValues state_after(const fs::path& directory, std::int64_t step) {
  const ModelConfig config = tiny_teacher();
  const ParameterTable table(tiny_student(config, tiny_students(config)[2].mixers));
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
  load_checkpoint(step_path(directory / "checkpoints", step), tensors, *make_self_communicator());
  return values;
}

// Steps, or events but those of checkpoints, which hang on the disk's speed.
std::vector<nlohmann::json> lines_of(const fs::path& directory, bool events) {
  std::ifstream file(directory / "metrics.jsonl");
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(file, line);) {
    nlohmann::json object = nlohmann::json::parse(line);
    if (object.contains("event") == events && object.value("event", "") != "checkpoint") {
      lines.push_back(std::move(object));
    }
  }
  return lines;
}

class SkippedSteps : public testing::TestWithParam<Poison> {};

TEST_P(SkippedSteps, UpdateNothingAndAreCounted) {
  const SharedDirectory directory;
  make_directory(directory.path());
  run(directory.path(), {.poisoned = {1, 2}, .poison = GetParam()});
  if (test_world().rank() != 0) {
    return;
  }
  EXPECT_EQ(state_after(directory.path(), 1), state_after(directory.path(), 3));
  EXPECT_NE(state_after(directory.path(), 3), state_after(directory.path(), 4));
  EXPECT_EQ(read_checkpoint_info(step_path(directory.path() / "checkpoints", 4)).skipped, 2);
  const auto steps = lines_of(directory.path(), false);
  ASSERT_EQ(steps.size(), 5U);
  const std::vector<int> skipped{0, 1, 2, 2, 2};
  for (std::size_t step = 0; step < steps.size(); ++step) {
    EXPECT_EQ(steps[step]["skipped_steps"], skipped[step]) << "step " << step + 1;
    const bool is_poisoned = step == 1 || step == 2;
    const char* const broken = GetParam() == Poison::loss ? "loss" : "grad_norm";
    EXPECT_EQ(steps[step][broken].is_null(), is_poisoned) << "step " << step + 1;
  }
  const auto events = lines_of(directory.path(), true);
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(events[0]["event"], "skipped");
  EXPECT_EQ(events[0]["step"], 2);
  EXPECT_EQ(events[1]["step"], 3);
}

// Bit for bit: AdamW's step number, its moments and the weights know nothing of a skipped step.
TEST_P(SkippedSteps, LeaveTheRunThatNeverHadThem) {
  const SharedDirectory directory;
  const fs::path with = directory.path() / "with";
  const fs::path without = directory.path() / "without";
  make_directory(with);
  make_directory(without);
  run(with, {.steps = 5, .poisoned = {1}, .poison = GetParam()});
  run(without, {.steps = 4, .left_out = {1}});
  if (test_world().rank() == 0) {
    EXPECT_EQ(state_after(with, 4), state_after(without, 3));  // moments of the stage included
    EXPECT_EQ(state_after(with, 5), state_after(without, 4));
  }
}

TEST_P(SkippedSteps, AreStillCountedAfterAResume) {
  const SharedDirectory directory;
  const fs::path whole = directory.path() / "whole";
  const fs::path parts = directory.path() / "parts";
  make_directory(whole);
  const RunOptions options{.steps = 5, .poisoned = {1}, .poison = GetParam()};
  run(whole, options);
  if (test_world().rank() == 0) {
    fs::copy(whole, parts, fs::copy_options::recursive | fs::copy_options::copy_symlinks);
    for (const std::int64_t step : {3, 4, 5}) {
      fs::remove_all(step_path(parts / "checkpoints", step));
    }
  }
  test_world().barrier();
  run(parts, options);
  if (test_world().rank() == 0) {
    EXPECT_EQ(state_after(parts, 4), state_after(whole, 4));
    EXPECT_EQ(state_after(parts, 5), state_after(whole, 5));
    EXPECT_EQ(lines_of(parts, true), lines_of(whole, true));
  }
}

TEST_P(SkippedSteps, TooManyInARowEndTheRunOnEveryRank) {
  const SharedDirectory directory;
  make_directory(directory.path());
  const RunOptions options{.steps = 8, .poisoned = {0, 1, 3, 4, 5}, .poison = GetParam()};
  const std::string error = error_of([&] { run(directory.path(), options); });
  EXPECT_NE(error.find("3 steps in a row up to distill step 6"), std::string::npos) << error;
  EXPECT_NE(error.find("run.max_skipped"), std::string::npos) << error;
  test_world().barrier();
  if (test_world().rank() == 0) {
    EXPECT_EQ(read_checkpoint_info(*latest_checkpoint(directory.path() / "checkpoints")).step, 5);
    EXPECT_EQ(lines_of(directory.path(), false).size(), 6U);
  }
}

TEST(StoppedRun, SavesAtTheEndOfTheStepOnEveryRankAndGoesOn) {
  const SharedDirectory directory;
  const fs::path whole = directory.path() / "whole";
  const fs::path parts = directory.path() / "parts";
  make_directory(whole);
  make_directory(parts);
  EXPECT_EQ(run(whole, {.steps = 5}), RunEnd::finished);
  EXPECT_EQ(run(parts, {.steps = 5, .signal_in = 1}), RunEnd::stopped);
  if (test_world().rank() == 0) {
    EXPECT_EQ(read_checkpoint_info(*latest_checkpoint(parts / "checkpoints")).step, 2);
    const auto events = lines_of(parts, true);
    ASSERT_EQ(events.size(), 1U);
    EXPECT_EQ(events[0]["event"], "stopped");
    EXPECT_EQ(events[0]["signal"], "SIGUSR1");
    EXPECT_EQ(events[0]["step"], 2);
  }
  test_world().barrier();
  EXPECT_EQ(run(parts, {.steps = 5}), RunEnd::finished);
  if (test_world().rank() == 0) {
    EXPECT_EQ(state_after(parts, 4), state_after(whole, 4));
    EXPECT_EQ(state_after(parts, 5), state_after(whole, 5));
    EXPECT_EQ(lines_of(parts, false).size(), 5U);
  }
}

// The last step ends a run anyway: nothing is left to stop.
TEST(StoppedRun, ASignalInTheLastStepLetsTheRunFinish) {
  const SharedDirectory directory;
  make_directory(directory.path());
  EXPECT_EQ(run(directory.path(), {.steps = 2, .signal_in = 1}), RunEnd::finished);
}

INSTANTIATE_TEST_SUITE_P(Of,
                         SkippedSteps,
                         testing::Values(Poison::loss, Poison::gradient),
                         [](const auto& of) {
                           return of.param == Poison::loss ? "Loss" : "Gradient";
                         });

}  // namespace

}  // namespace bifocal::test
