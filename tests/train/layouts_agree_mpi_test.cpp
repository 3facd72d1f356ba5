// Losses, gradients and trained weights do not depend on how rows, heads and weights are cut over
// ranks.
#include <cstring>

#include <gtest/gtest.h>

#include "distill/align_stage.h"
#include "distill/logit_stage.h"
#include "parallel/shard.h"
#include "support/compare.h"
#include "support/mpi_world.h"
#include "support/tiny_model.h"
#include "train/optimizer.h"

namespace bifocal::test {

namespace {

enum class Kind : std::uint8_t { align_new, align_mixer, distill, pretrain };

struct Scenario {
  Kind kind = Kind::distill;
  ModelConfig teacher;
  std::vector<MixerSettings> mixers;
  DType dtype = DType::f64;
  TeacherPlacement placement = TeacherPlacement::look_ahead;
  Weights::Placement weights = Weights::Placement::replicated;
  RecomputePlan recompute = Recompute::none;
  LogitLossOptions loss{.chunk = 7};
  std::int64_t row_tokens = 53;
  std::int64_t rows_per_step = 4;
  std::int64_t steps = 2;
  Masked masked{};

  Row row(std::int64_t position) const {
    return random_row(position, row_tokens, teacher.vocabulary, masked);
  }

  StageRows rows() const {
    return stage_rows(
        [this](std::int64_t position) { return row(position); }, rows_per_step, steps);
  }
};

// What a few optimiser steps leave behind.
struct Outcome {
  std::vector<double> losses;  // loss, kl, ce of each step, and the layers' losses
  std::vector<double> norms;
  std::vector<double> kept;
  NamedValues gradients;  // of the first step
  NamedValues weights;    // after the last
};

std::unique_ptr<Stage> make_stage(const Scenario& scenario,
                                  Context context,
                                  TinyModel& student,
                                  TinyModel& teacher,
                                  const Mesh& mesh) {
  if (scenario.kind == Kind::align_new || scenario.kind == Kind::align_mixer) {
    const auto trainable =
        scenario.kind == Kind::align_new ? AlignTrainable::new_tensors : AlignTrainable::mixer;
    return std::make_unique<AlignStage>(context,
                                        student.decoder(),
                                        teacher.decoder(),
                                        mesh,
                                        scenario.placement,
                                        trainable,
                                        scenario.rows());
  }
  return std::make_unique<LogitStage>(context,
                                      student.decoder(),
                                      scenario.kind == Kind::distill ? &teacher.decoder() : nullptr,
                                      mesh,
                                      scenario.placement,
                                      scenario.recompute,
                                      scenario.loss,
                                      scenario.rows());
}

// Adam's epsilon of the golden files, 1e-4: a small one turns the rounding of gradients near zero
// into steps of full size.
Outcome train(const Scenario& scenario,
              std::unique_ptr<Communicator> world,
              const MeshCounts& counts) {
  Device device(scenario.dtype);
  const Mesh mesh(std::move(world), counts);
  TinyModel teacher(
      device.context(), scenario.teacher, mesh.world(), Weights::Placement::sharded, 1);
  TinyModel student(device.context(),
                    tiny_student(scenario.teacher, scenario.mixers),
                    mesh.world(),
                    scenario.weights,
                    2);
  Gradients gradients(device.context(), student.table(), mesh.world());
  Optimizer optimizer(device.context(), student.weights(), {.eps = 1e-4, .decay = 0.1});
  const auto stage = make_stage(scenario, device.context(), student, teacher, mesh);
  Outcome outcome;
  for (std::int64_t step = 0; step < scenario.steps; ++step) {
    gradients.clear();
    const StepResult result = stage->run_step(step, gradients);
    outcome.losses.insert(outcome.losses.end(), {result.loss, result.kl, result.ce});
    outcome.losses.insert(
        outcome.losses.end(), result.layer_losses.begin(), result.layer_losses.end());
    outcome.kept.push_back(result.kept);
    if (step == 0) {
      outcome.gradients =
          whole_gradients(student.table(), gradients, mesh.world(), result.unit_factors);
    }
    outcome.norms.push_back(
        optimizer.update({.trains = [&](const Parameter& p) { return stage->trains(p); },
                          .rate = [](const Parameter&) { return 1e-3; },
                          .decays = [](const Parameter& p) { return p.decays; },
                          .clip_scope = stage->clip_scope(),
                          .clip = 1.0,
                          .unit_factors = result.unit_factors,
                          .unit_squares = result.unit_squares,
                          .number = step + 1},
                         gradients));
  }
  outcome.weights = whole_weights(student.weights());
  return outcome;
}

// double: sums of some thousand terms in another order, 1e-10 of the tensor's or 1 % of the largest
// gradient. float32: the bounds of the specification for float32 against its references, and of its
// ten AdamW steps for weights.
void expect_equal(const Outcome& got, const Outcome& want, DType dtype) {
  const bool exact = dtype == DType::f64;
  EXPECT_EQ(got.kept, want.kept);
  EXPECT_CLOSE(got.losses, want.losses, exact ? 1e-10 : 1e-5);
  EXPECT_CLOSE(got.norms, want.norms, exact ? 1e-10 : 2e-4);
  const double floor = 0.01 * largest(want.gradients);
  EXPECT_GT(floor, 0.0);
  for (const auto& [name, gradient] : want.gradients) {
    const Difference d = difference(got.gradients.at(name), gradient);
    EXPECT_LE(d.largest, (exact ? 1e-10 : 2e-5) * std::max(d.scale, floor))
        << name << ": " << d.describe();
  }
  for (const auto& [name, weight] : want.weights) {
    EXPECT_TRUE(is_within(got.weights.at(name), weight, exact ? 1e-10 : 2e-5)) << name;
  }
}

// Trains on one rank and on every mesh of the ranks at hand.
void expect_layouts_agree(const Scenario& scenario) {
  const Outcome want = train(scenario, make_self_communicator(), {.data = 1, .sequence = 1});
  for (const MeshCounts& counts : meshes_of(test_world().size())) {
    const bool ulysses = scenario.placement == TeacherPlacement::ulysses;
    if (ulysses && scenario.teacher.kv_heads % counts.sequence != 0) {
      continue;
    }
    SCOPED_TRACE(fmt::format("mesh {} x {}", counts.data, counts.sequence));
    expect_equal(train(scenario, test_world().split(0), counts), want, scenario.dtype);
  }
}

// Rows of a step that every mesh of these ranks divides.
std::int64_t rows_per_step() {
  return test_world().size() == 3 ? 3 : 4;
}

// Half of the work with sharded weights and recomputation, so that each student meets both.
Scenario scenario_of(Kind kind, const ModelConfig& teacher, std::size_t student) {
  const bool odd = student % 2 == 1;
  const RecomputePlan some = student % 4 == 1 ? RecomputePlan(Recompute::block, 1)
                                              : RecomputePlan(Recompute::mlp, 2);
  return {.kind = kind,
          .teacher = teacher,
          .mixers = tiny_students(teacher)[student].mixers,
          .weights = odd ? Weights::Placement::sharded : Weights::Placement::replicated,
          .recompute = odd ? some : Recompute::none,
          .rows_per_step = rows_per_step()};
}

constexpr std::size_t kStudents = 6;

TEST(LayoutsAgree, DistilOfEveryStudentInDouble) {
  for (std::size_t student = 0; student < kStudents; ++student) {
    SCOPED_TRACE(tiny_students(tiny_teacher())[student].name);
    Scenario scenario = scenario_of(Kind::distill, tiny_teacher(), student);
    if (student == 2) {
      scenario.loss = {.temperature = 2.0, .ce_share = 0.3, .chunk = 16};
    }
    expect_layouts_agree(scenario);
  }
}

TEST(LayoutsAgree, DistilInFloat) {
  for (const std::size_t student : {2, 4}) {
    SCOPED_TRACE(tiny_students(tiny_teacher())[student].name);
    Scenario scenario = scenario_of(Kind::distill, tiny_teacher(), student);
    scenario.dtype = DType::f32;
    scenario.steps = 3;
    expect_layouts_agree(scenario);
  }
}

// Key-value heads that every sequence count of these ranks divides.
TEST(LayoutsAgree, DistilUnderAnUlyssesTeacher) {
  const ModelConfig teacher = tiny_teacher(Family::qwen3, test_world().size() == 3 ? 3 : 4);
  for (const std::size_t student : {2, 5}) {
    Scenario scenario = scenario_of(Kind::distill, teacher, student);
    scenario.placement = TeacherPlacement::ulysses;
    expect_layouts_agree(scenario);
  }
}

TEST(LayoutsAgree, AlignOfEveryStudent) {
  for (std::size_t student = 0; student < kStudents; ++student) {
    if (student == 1) {
      continue;
    }  // pinned tokens alone: nothing new to train
    SCOPED_TRACE(tiny_students(tiny_teacher())[student].name);
    expect_layouts_agree(scenario_of(Kind::align_new, tiny_teacher(), student));
  }
  expect_layouts_agree(scenario_of(Kind::align_mixer, tiny_teacher(), 1));
}

TEST(LayoutsAgree, AlignUnderAnUlyssesTeacher) {
  const ModelConfig teacher = tiny_teacher(Family::qwen3, test_world().size() == 3 ? 3 : 4);
  for (const std::size_t student : {2, 4, 5}) {
    SCOPED_TRACE(tiny_students(teacher)[student].name);
    Scenario scenario =
        scenario_of(student == 2 ? Kind::align_new : Kind::align_mixer, teacher, student);
    scenario.placement = TeacherPlacement::ulysses;
    expect_layouts_agree(scenario);
  }
}

TEST(LayoutsAgree, AlignInFloat) {
  Scenario scenario = scenario_of(Kind::align_mixer, tiny_teacher(), 3);
  scenario.dtype = DType::f32;
  scenario.steps = 3;
  expect_layouts_agree(scenario);
}

TEST(LayoutsAgree, PretrainingOfOtherFamilies) {
  for (const Family family : {Family::qwen2, Family::llama}) {
    SCOPED_TRACE(name_of(family));
    Scenario scenario =
        scenario_of(Kind::pretrain, tiny_teacher(family), family == Family::qwen2 ? 0 : 3);
    scenario.loss.ce_share = 1.0;
    expect_layouts_agree(scenario);
  }
}

// Whether this token of this row lies on `rank` of the mesh.
bool lies_on(const MeshCounts& counts,
             int rank,
             const Scenario& scenario,
             std::int64_t position,
             std::int64_t token) {
  const std::int64_t group =
      position % scenario.rows_per_step * counts.data / scenario.rows_per_step;
  const ShardRange shard = shard_range(scenario.row_tokens,
                                       static_cast<int>(counts.sequence),
                                       static_cast<int>(rank % counts.sequence));
  return group == rank / counts.sequence && token >= shard.begin && token < shard.end;
}

TEST(LayoutsAgree, WhereOneRankHasNothingToLearnFrom) {
  const int last = test_world().size() - 1;
  if (last == 0) {
    return;
  }  // tests/distill has the lone rank
  for (const MeshCounts& counts : meshes_of(test_world().size())) {
    for (const Kind kind : {Kind::distill, Kind::align_new}) {
      Scenario scenario = scenario_of(kind, tiny_teacher(), 2);
      scenario.steps = 1;
      const Scenario shape = scenario;
      scenario.masked = [=](std::int64_t position, std::int64_t token) {
        return lies_on(counts, last, shape, position, token);
      };
      const Outcome want = train(scenario, make_self_communicator(), {.data = 1, .sequence = 1});
      expect_equal(train(scenario, test_world().split(0), counts), want, scenario.dtype);
    }
  }
}

TEST(LayoutsAgree, WhereShardsAreEmptyOrShorterThanTheWindow) {
  const int ranks = test_world().size();
  for (const std::int64_t tokens : {std::max(ranks - 1, 1), 2 * ranks + 1}) {
    for (const std::size_t student : {2, 4, 5}) {
      SCOPED_TRACE(fmt::format("{} tokens, student {}", tokens, student));
      Scenario scenario = scenario_of(Kind::distill, tiny_teacher(), student);
      scenario.row_tokens = tokens;
      scenario.loss.ce_share = 0.5;
      scenario.steps = 1;
      expect_layouts_agree(scenario);
    }
  }
}

TEST(LayoutsAgree, CountsOfTokensDoNotDependOnTheRanks) {
  Scenario scenario = scenario_of(Kind::distill, tiny_teacher(), 0);
  scenario.steps = 3;
  std::vector<double> want;
  for (std::int64_t step = 0; step < scenario.steps; ++step) {
    want.push_back(0.0);
    for (std::int64_t row = 0; row < scenario.rows_per_step; ++row) {
      want.back() += count_kept(scenario.row(step * scenario.rows_per_step + row)).kept;
    }
  }
  EXPECT_NE(want[0], want[1]);  // else a repeated row would pass
  EXPECT_NE(want[1], want[2]);
  for (const MeshCounts& counts : meshes_of(test_world().size())) {
    EXPECT_EQ(train(scenario, test_world().split(0), counts).kept, want);
    Scenario align = scenario;
    align.kind = Kind::align_new;
    EXPECT_EQ(train(align, test_world().split(0), counts).kept, want);
  }
}

void expect_same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  ASSERT_EQ(a.size(), b.size());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(double)), 0);
}

void expect_same_outcome(const Outcome& a, const Outcome& b) {
  expect_same_bits(a.losses, b.losses);
  expect_same_bits(a.norms, b.norms);
  for (const auto& [name, weight] : a.weights) {
    SCOPED_TRACE(name);
    expect_same_bits(b.weights.at(name), weight);
    expect_same_bits(b.gradients.at(name), a.gradients.at(name));
  }
}

// A second run of the same configuration, and one with recomputation and sharded weights: those
// change where numbers lie, not what they are.
TEST(LayoutsAgree, TwoRunsGiveTheSameBitsAlsoWithRecomputationAndShardedWeights) {
  for (const MeshCounts& counts : meshes_of(test_world().size())) {
    SCOPED_TRACE(fmt::format("mesh {} x {}", counts.data, counts.sequence));
    for (const Kind kind : {Kind::distill, Kind::align_mixer}) {
      Scenario scenario = scenario_of(kind, tiny_teacher(), kind == Kind::distill ? 4 : 2);
      scenario.dtype = DType::f32;
      const Outcome first = train(scenario, test_world().split(0), counts);
      expect_same_outcome(train(scenario, test_world().split(0), counts), first);
      scenario.weights = Weights::Placement::sharded;
      for (const Recompute level : {Recompute::light, Recompute::block}) {
        scenario.recompute = level;
        expect_same_outcome(train(scenario, test_world().split(0), counts), first);
      }
    }
  }
}

}  // namespace

}  // namespace bifocal::test
