// Losses, gradients and trained weights do not depend on how rows, heads and weights are cut over
// ranks.
#include <gtest/gtest.h>

#include "parallel/shard.h"
#include "support/layout_run.h"
#include "support/mpi_world.h"

namespace bifocal::test {

namespace {

// On the CPU.
Outcome train(const Scenario& scenario,
              std::unique_ptr<Communicator> world,
              const MeshCounts& counts) {
  const std::unique_ptr<Backend> cpu = make_cpu_backend(0);
  return train(scenario, *cpu, std::move(world), counts);
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
    expect_same_training(train(scenario, test_world().split(0), counts), want, scenario.dtype);
  }
}

// Rows of a step that every mesh of these ranks divides.
std::int64_t rows_per_step() {
  return test_world().size() == 3 ? 3 : 4;
}

// Half of the work with sharded weights and recomputation, so that each student meets both.
Scenario scenario_of(StageKind kind, const ModelConfig& teacher, std::size_t student) {
  const bool odd = student % 2 == 1;
  const RecomputePlan some =
      student % 4 == 1 ? RecomputePlan(Recompute::block, 1) : RecomputePlan(Recompute::mlp, 2);
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
    Scenario scenario = scenario_of(StageKind::distill, tiny_teacher(), student);
    if (student == 2) {
      scenario.loss = {.temperature = 2.0, .ce_share = 0.3, .chunk = 16};
    }
    expect_layouts_agree(scenario);
  }
}

TEST(LayoutsAgree, DistilInFloat) {
  for (const std::size_t student : {2, 4}) {
    SCOPED_TRACE(tiny_students(tiny_teacher())[student].name);
    Scenario scenario = scenario_of(StageKind::distill, tiny_teacher(), student);
    scenario.dtype = DType::f32;
    scenario.steps = 3;
    expect_layouts_agree(scenario);
  }
}

// Key-value heads that every sequence count of these ranks divides.
TEST(LayoutsAgree, DistilUnderAnUlyssesTeacher) {
  const ModelConfig teacher = tiny_teacher(Family::qwen3, test_world().size() == 3 ? 3 : 4);
  for (const std::size_t student : {2, 5}) {
    Scenario scenario = scenario_of(StageKind::distill, teacher, student);
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
    expect_layouts_agree(scenario_of(StageKind::align_new, tiny_teacher(), student));
  }
  expect_layouts_agree(scenario_of(StageKind::align_mixer, tiny_teacher(), 1));
}

TEST(LayoutsAgree, AlignUnderAnUlyssesTeacher) {
  const ModelConfig teacher = tiny_teacher(Family::qwen3, test_world().size() == 3 ? 3 : 4);
  for (const std::size_t student : {2, 4, 5}) {
    SCOPED_TRACE(tiny_students(teacher)[student].name);
    Scenario scenario =
        scenario_of(student == 2 ? StageKind::align_new : StageKind::align_mixer, teacher, student);
    scenario.placement = TeacherPlacement::ulysses;
    expect_layouts_agree(scenario);
  }
}

TEST(LayoutsAgree, AlignInFloat) {
  Scenario scenario = scenario_of(StageKind::align_mixer, tiny_teacher(), 3);
  scenario.dtype = DType::f32;
  scenario.steps = 3;
  expect_layouts_agree(scenario);
}

TEST(LayoutsAgree, PretrainingOfOtherFamilies) {
  for (const Family family : {Family::qwen2, Family::llama}) {
    SCOPED_TRACE(name_of(family));
    Scenario scenario =
        scenario_of(StageKind::pretrain, tiny_teacher(family), family == Family::qwen2 ? 0 : 3);
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
    for (const StageKind kind : {StageKind::distill, StageKind::align_new}) {
      Scenario scenario = scenario_of(kind, tiny_teacher(), 2);
      scenario.steps = 1;
      const Scenario shape = scenario;
      scenario.masked = [=](std::int64_t position, std::int64_t token) {
        return lies_on(counts, last, shape, position, token);
      };
      const Outcome want = train(scenario, make_self_communicator(), {.data = 1, .sequence = 1});
      expect_same_training(train(scenario, test_world().split(0), counts), want, scenario.dtype);
    }
  }
}

TEST(LayoutsAgree, WhereShardsAreEmptyOrShorterThanTheWindow) {
  const int ranks = test_world().size();
  for (const std::int64_t tokens : {std::max(ranks - 1, 1), 2 * ranks + 1}) {
    for (const std::size_t student : {2, 4, 5}) {
      SCOPED_TRACE(fmt::format("{} tokens, student {}", tokens, student));
      Scenario scenario = scenario_of(StageKind::distill, tiny_teacher(), student);
      scenario.row_tokens = tokens;
      scenario.loss.ce_share = 0.5;
      scenario.steps = 1;
      expect_layouts_agree(scenario);
    }
  }
}

TEST(LayoutsAgree, CountsOfTokensDoNotDependOnTheRanks) {
  Scenario scenario = scenario_of(StageKind::distill, tiny_teacher(), 0);
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
    align.kind = StageKind::align_new;
    EXPECT_EQ(train(align, test_world().split(0), counts).kept, want);
  }
}

// A second run of the same configuration, and one with recomputation and sharded weights: those
// change where numbers lie, not what they are.
TEST(LayoutsAgree, TwoRunsGiveTheSameBitsAlsoWithRecomputationAndShardedWeights) {
  for (const MeshCounts& counts : meshes_of(test_world().size())) {
    SCOPED_TRACE(fmt::format("mesh {} x {}", counts.data, counts.sequence));
    for (const StageKind kind : {StageKind::distill, StageKind::align_mixer}) {
      Scenario scenario = scenario_of(kind, tiny_teacher(), kind == StageKind::distill ? 4 : 2);
      scenario.dtype = DType::f32;
      const Outcome first = train(scenario, test_world().split(0), counts);
      expect_same_bits(train(scenario, test_world().split(0), counts), first);
      scenario.weights = Weights::Placement::sharded;
      for (const Recompute level : {Recompute::light, Recompute::block}) {
        scenario.recompute = level;
        expect_same_bits(train(scenario, test_world().split(0), counts), first);
      }
    }
  }
}

}  // namespace

}  // namespace bifocal::test
