// Decisions of a run and the errors of those that cannot work.
#include "plan/plan.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "hf/hf_config.h"
#include "hf/hf_shapes.h"
#include "support/error_of.h"

namespace bifocal {
namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

PlanInputs qwen3_4b_run(const std::string& preset, int ranks) {
  PlanInputs inputs{.ranks = ranks, .ranks_per_node = 8};
  inputs.teacher = parse_hf_config(testing::qwen3_4b().dump(), "qwen3-4b");
  inputs.student = *inputs.teacher;
  inputs.student.mixers = make_mixers(preset, 576, {}, *inputs.teacher);
  inputs.teacher_storage = DType::bf16;
  inputs.config.memory.recompute = "block";
  inputs.config.memory.weights = "shard";
  return inputs;
}

std::string error_of(const PlanInputs& inputs) {
  return test::error_of([&] { make_plan(inputs); });
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Plan, CountsParametersAsTheTableDoes) {
  const PlanInputs inputs = qwen3_4b_run("bifocal", 8);
  const Plan plan = make_plan(inputs);
  EXPECT_EQ(plan.copied_parameters + plan.new_parameters, ParameterTable(inputs.student).total());
  EXPECT_EQ(plan.copied_parameters, ParameterTable(*inputs.teacher).total());
  ASSERT_EQ(plan.stages.size(), 2U);
  EXPECT_EQ(plan.stages[0].trained, plan.new_parameters);
  EXPECT_EQ(plan.stages[1].trained, plan.copied_parameters + plan.new_parameters);
  // The article's 819 M and 3.28 B tokens.
  EXPECT_EQ(plan.stages[0].tokens, 2500LL * 8 * 40960);
  EXPECT_EQ(plan.stages[1].tokens, 10000LL * 8 * 40960);
}

TEST(Plan, SharesCoverEveryTokenOfEveryRowOnce) {
  for (const int ranks : {1, 2, 3, 6, 8}) {
    PlanInputs inputs = qwen3_4b_run("bifocal", ranks);
    inputs.config.mesh = {.data = ranks % 2 == 0 ? 2 : 1, .sequence = 0};
    inputs.config.data.rows_per_step = 24;
    const Plan plan = make_plan(inputs);
    ASSERT_EQ(plan.shares.size(), static_cast<std::size_t>(ranks));
    std::int64_t distill = 0;
    std::int64_t align = 0;
    for (const RankShare& share : plan.shares) {
      distill += share.rows.size() * share.tokens.size();
      align += share.align_rows.size() * share.align_tokens.size();
      EXPECT_EQ(share.rank, share.data_index * plan.mesh.sequence + share.sequence_index);
    }
    EXPECT_EQ(distill, 24 * inputs.config.data.row_tokens);
    EXPECT_EQ(align, 24 * inputs.config.data.row_tokens);
  }
}

TEST(Plan, MoreRanksNeedLessMemoryEach) {
  PlanInputs eight = qwen3_4b_run("bifocal", 8);
  PlanInputs sixteen = qwen3_4b_run("bifocal", 16);
  sixteen.config.mesh.sequence = 2;
  const Plan small = make_plan(sixteen);
  const Plan large = make_plan(eight);
  EXPECT_LT(small.stages[1].memory.total, large.stages[1].memory.total);
  EXPECT_EQ(small.placement.work, TeacherPlacement::ulysses);  // 8 rows for 16 ranks
  EXPECT_TRUE(contains(small.placement.note, "ulysses"));
  // Two float32 moments and gradients of 4.05 billion parameters over 8 ranks.
  EXPECT_NEAR(static_cast<double>(large.stages[1].memory.of(Region::optimizer)) / kGiB, 3.8, 0.1);
}

TEST(Plan, ASinkTokenStudentSkipsAlign) {
  PlanInputs inputs = qwen3_4b_run("swa_sink_tokens", 16);
  inputs.config.mesh.sequence = 2;
  const Plan dropped = make_plan(inputs);
  ASSERT_EQ(dropped.stages.size(), 1U);
  EXPECT_EQ(dropped.stages[0].steps, 10000);
  EXPECT_FALSE(dropped.stages_note.empty());
  // Without align nothing keeps the teacher from whole rows.
  EXPECT_EQ(dropped.placement.work, TeacherPlacement::look_ahead);
  inputs.config.align_extra.skipped = "distill";
  EXPECT_EQ(make_plan(inputs).stages[0].steps, 12500);
}

TEST(Plan, PretrainNeedsNoTeacher) {
  PlanInputs inputs = qwen3_4b_run("bifocal", 8);
  inputs.teacher.reset();
  const Plan plan = make_plan(inputs);
  ASSERT_EQ(plan.stages.size(), 1U);
  EXPECT_EQ(plan.stages[0].kind, StageKind::pretrain);
  EXPECT_EQ(plan.stages[0].memory.of(Region::teacher_weights), 0);
}

// One card of 80 GB (79.6 GiB, of which 3 % lie between tensors) holds the 4B pair with narrow
// moments or moments on the host; one of 141 GB with float32 moments.
TEST(Plan, KeepsAsMuchAsACardHolds) {
  PlanInputs inputs = qwen3_4b_run("bifocal", 1);
  inputs.config.run.device = "cuda";
  inputs.config.memory.recompute = "auto";
  inputs.config.memory.limit_gib = 139.0;
  const StageMemory large = plan_memory(inputs, StageKind::distill);
  EXPECT_LE(static_cast<double>(large.peak.total), usable_bytes(inputs.config));
  EXPECT_GT(static_cast<double>(large.peak.total), 0.97 * usable_bytes(inputs.config));
  EXPECT_LT(large.recompute.level, Recompute::block);

  inputs.config.memory.limit_gib = 79.6;
  const std::string error = error_of(inputs);
  EXPECT_FALSE(contains(error, "memory.recompute"));  // it is auto already
  EXPECT_TRUE(contains(error, "optimizer.moments = \"bfloat16\" ("));
  EXPECT_TRUE(contains(error, "optimizer.moments = \"host\" ("));
  EXPECT_TRUE(contains(error, "2 ranks in one sequence group"));
  for (const char* moments : {"bfloat16", "host"}) {
    inputs.config.optimizer.moments = moments;
    EXPECT_EQ(make_plan(inputs).stages.back().kind, StageKind::distill);
  }
}

// What is offered names all that it changes, and fits as it stands.
TEST(Plan, AdviceHoldsForItself) {
  PlanInputs inputs = qwen3_4b_run("bifocal", 1);
  inputs.config.run.device = "cuda";
  inputs.config.memory.recompute = "mlp";
  inputs.config.memory.kept_layers = 3;
  inputs.config.teacher.placement = "look-ahead";
  inputs.config.memory.weights = "replicate";
  inputs.config.memory.limit_gib = 79.6;
  const std::string recompute = ", memory.recompute = \"auto\", memory.kept_layers = 0";
  std::vector<std::string> fits = what_fits(inputs, StageKind::distill);
  ASSERT_EQ(fits.size(), 3U) << error_of(inputs);
  EXPECT_TRUE(fits[0].starts_with("optimizer.moments = \"bfloat16\"" + recompute + " ("));
  EXPECT_TRUE(fits[1].starts_with("optimizer.moments = \"host\"" + recompute + " ("));
  EXPECT_TRUE(
      fits[2].starts_with("2 ranks in one sequence group, memory.weights = \"shard\", "
                          "teacher.placement = \"auto\"" +
                          recompute + " ("))
      << fits[2];
  PlanInputs two = inputs;
  two.ranks = two.ranks_per_node = 2;
  two.config.memory.recompute = "auto";
  two.config.memory.kept_layers = 0;
  two.config.memory.weights = "shard";
  two.config.mesh = {.data = 1, .sequence = 0};
  two.config.teacher.placement = "auto";
  const auto peak = static_cast<double>(plan_memory(two, StageKind::distill).peak.total);
  EXPECT_LE(peak, usable_bytes(two.config));
  EXPECT_TRUE(contains(fits[2], "(" + format_bytes(peak) + ")"));

  // Recomputation alone.
  inputs.config.memory.limit_gib = 139.0;
  fits = what_fits(inputs, StageKind::distill);
  ASSERT_FALSE(fits.empty());
  EXPECT_TRUE(fits[0].starts_with("memory.recompute = \"auto\", memory.kept_layers = 0 ("));

  // Moments on the host and in bfloat16 are never offered together.
  for (double limit = 8.0; limit < 100.0; limit += 8.0) {
    inputs.config.memory.limit_gib = limit;
    for (const std::string& change : what_fits(inputs, StageKind::distill)) {
      EXPECT_FALSE(contains(change, "\"bfloat16\"") && contains(change, "\"host\"")) << change;
    }
  }
}

// The forecast of what is about to run may be a little too high.
TEST(Plan, RefusesWhatIsSurelyTooLarge) {
  PlanInputs inputs = qwen3_4b_run("bifocal", 8);
  const StageMemory memory = plan_memory(inputs, StageKind::distill);
  EXPECT_EQ(memory.kind, StageKind::distill);
  const double peak = static_cast<double>(memory.peak.total) / kGiB;
  inputs.limit_name = "the device's free memory";
  inputs.config.memory.limit_gib = 0.96 * peak;
  require_memory(inputs, memory, 0.95);
  EXPECT_TRUE(contains(test::error_of([&] { require_memory(inputs, memory); }),
                       "but the device's free memory leaves"));
  inputs.config.memory.limit_gib = 0.94 * peak;
  EXPECT_TRUE(
      contains(test::error_of([&] { require_memory(inputs, memory, 0.95); }), "distill needs"));
}

TEST(Plan, ForecastsEveryStageThatRuns) {
  PlanInputs inputs = qwen3_4b_run("bifocal", 8);
  ASSERT_EQ(plan_stages(inputs).size(), 2U);
  EXPECT_EQ(plan_stages(inputs)[0].kind, StageKind::align);
  EXPECT_EQ(plan_stages(inputs)[1].kind, StageKind::distill);
  inputs.config.distill.steps = 0;
  EXPECT_EQ(plan_stages(inputs).size(), 1U);
  inputs.teacher.reset();
  ASSERT_EQ(plan_stages(inputs).size(), 1U);
  EXPECT_EQ(plan_stages(inputs)[0].kind, StageKind::pretrain);
}

TEST(Plan, RefusesWhatCannotRun) {
  PlanInputs inputs = qwen3_4b_run("bifocal", 5);
  EXPECT_TRUE(contains(error_of(inputs), "5 data ranks cannot share evenly"));

  inputs = qwen3_4b_run("bifocal", 6);
  inputs.config.mesh = {.data = 2, .sequence = 2};
  EXPECT_TRUE(contains(error_of(inputs), "[mesh]"));

  inputs = qwen3_4b_run("bifocal", 3);
  inputs.config.mesh = {.data = 1, .sequence = 3};  // neither 8 rows nor 8 key-value heads over 3
  EXPECT_TRUE(contains(error_of(inputs), "8 key-value heads over 3 sequence ranks"));
  inputs.config.teacher.placement = "look-ahead";
  EXPECT_TRUE(contains(error_of(inputs), "wanted a multiple of the 3 ranks"));

  inputs = qwen3_4b_run("bifocal", 8);
  inputs.config.data.row_tokens = 262145;
  EXPECT_TRUE(contains(error_of(inputs), "at most 262144 positions"));

  inputs = qwen3_4b_run("bifocal", 8);
  inputs.config.memory.limit_gib = 1.0;
  EXPECT_TRUE(contains(error_of(inputs), "memory.limit_gib leaves 1.00 GiB to tensors"));

  inputs = qwen3_4b_run("bifocal", 8);
  inputs.student.vocabulary -= 1;
  EXPECT_TRUE(contains(error_of(inputs), "share one vocabulary"));

  inputs = qwen3_4b_run("bifocal", 8);
  inputs.student.hidden /= 2;
  EXPECT_TRUE(contains(error_of(inputs), "set align.steps = 0"));
}

}  // namespace
}  // namespace bifocal
