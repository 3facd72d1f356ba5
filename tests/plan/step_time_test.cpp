// Foretold step times against what was measured (docs/results/h200.json, h200.md), and against
// themselves.
#include "plan/step_time.h"

#include <fstream>
#include <map>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "hf/hf_config.h"
#include "hf/hf_shapes.h"

namespace bifocal {
namespace {

struct Measured {
  double value = 0.0;
  double flop_per_second = 0.0;
  double bytes_per_second = 0.0;
};

// Rows of docs/results/h200.json by name.
const std::map<std::string, Measured>& measured() {
  static const std::map<std::string, Measured> rows = [] {
    std::map<std::string, Measured> found;
    std::ifstream file(BIFOCAL_SOURCE_DIR "/docs/results/h200.json");
    const nlohmann::json results = nlohmann::json::parse(file);
    for (const auto& row : results.at("rows")) {
      found[row.at("name")] = {.value = row.at("ours"),
                               .flop_per_second = row.value("flop_per_second", 0.0),
                               .bytes_per_second = row.value("bytes_per_second", 0.0)};
    }
    return found;
  }();
  return rows;
}

// One row of 40,960 tokens for each data rank, as `bench step` measures, on so many H200 of one
// host.
PlanInputs qwen3_4b_step(const std::string& preset, MeshCounts mesh) {
  const auto ranks = static_cast<int>(mesh.data * mesh.sequence);
  PlanInputs inputs{.ranks = ranks, .ranks_per_node = ranks};
  inputs.teacher = parse_hf_config(testing::qwen3_4b().dump(), "qwen3-4b");
  inputs.student = *inputs.teacher;
  inputs.student.mixers = make_mixers(preset, 576, {}, *inputs.teacher);
  inputs.teacher_storage = DType::bf16;
  RunConfig& config = inputs.config;
  config.run.device = "cuda";
  config.mesh = {.data = mesh.data, .sequence = mesh.sequence};
  config.data.rows_per_step = mesh.data;
  config.align.steps = 0;
  config.memory.limit_gib = 139;
  return inputs;
}

MachineAssumptions h200(std::int64_t document_tokens = 0) {
  return {.gpu = *gpu_speed("h200"), .document_tokens = document_tokens};
}

StageTime last_stage(const PlanInputs& inputs, const MachineAssumptions& machine) {
  const Plan plan = make_plan(inputs);
  return predict_stage(inputs, plan, plan.stages.back(), machine);
}

void expect_within(double share, double predicted, double wanted, const std::string& what) {
  EXPECT_NEAR(predicted / wanted, 1.0, share)
      << what << ": predicted " << predicted << ", measured " << wanted;
}

TEST(StepTime, SpeedsAreThoseOfTheMeasuredOps) {
  const GpuSpeed gpu = *gpu_speed("h200");
  const auto& rows = measured();
  // FLOP/s of the difference of two rows in ms: forward and backward together, and forward alone.
  const auto backward = [&](const std::string& both, const std::string& forward) {
    const Measured& all = rows.at(both);
    const Measured& part = rows.at(forward);
    return (all.flop_per_second * all.value - part.flop_per_second * part.value) /
           (all.value - part.value);
  };
  constexpr double kRounded = 0.01;
  expect_within(kRounded, gpu.full_attention, rows.at("teacher_attention").flop_per_second, "full");
  expect_within(kRounded, gpu.window_forward, rows.at("swa448_forward").flop_per_second, "window");
  expect_within(kRounded,
                gpu.window_backward,
                backward("swa448_forward_backward", "swa448_forward"),
                "window backward");
  expect_within(
      kRounded, gpu.features_forward, rows.at("feature_maps").flop_per_second, "features");
  expect_within(kRounded,
                gpu.features_backward,
                rows.at("feature_maps_backward").flop_per_second,
                "features backward");
  expect_within(kRounded, gpu.mlstm_forward, rows.at("mlstm_forward").flop_per_second, "mLSTM");
  expect_within(kRounded,
                gpu.mlstm_backward,
                backward("mlstm_forward_backward", "mlstm_forward"),
                "mLSTM backward");
  expect_within(kRounded, gpu.head, rows.at("kl_head").flop_per_second, "head");
  expect_within(kRounded, gpu.memory, rows.at("adamw").bytes_per_second, "memory");
  for (const char* product : {"linear_qkv", "linear_o", "linear_gate_up", "linear_down"}) {
    EXPECT_LT(gpu.products, rows.at(product).flop_per_second) << "a step is no faster than an op";
  }
}

// What plan promises (docs/parallelism.md): closer than what settings and machines differ by.
constexpr double kShare = 0.10;

TEST(StepTime, OneGpuIsWithinTenPercent) {
  const StepSeconds whole = last_stage(qwen3_4b_step("bifocal", {1, 1}), h200()).step;
  const auto& rows = measured();
  expect_within(kShare, whole.total(), rows.at("step_bifocal_40960").value, "one document");
  const auto part = [&](const char* name) {
    return rows.at(std::string("step_bifocal_40960_") + name).value;
  };
  expect_within(kShare, whole.teacher, part("teacher_forward"), "teacher");
  expect_within(kShare, whole.student_forward, part("student_forward"), "student");
  expect_within(kShare, whole.head, part("head_and_loss"), "head");
  expect_within(
      kShare, whole.student_backward + whole.recomputed, part("student_backward"), "backward");
  expect_within(kShare, whole.optimizer, part("optimizer") + part("gradients"), "optimizer");
  EXPECT_EQ(whole.communication, 0.0);

  const StepSeconds packed = last_stage(qwen3_4b_step("bifocal", {1, 1}), h200(4096)).step;
  expect_within(kShare, packed.total(), rows.at("step_bifocal_packed").value, "packed");
  // The rate of products in a step comes from this row: here only the counting can go wrong.
  expect_within(kShare, packed.teacher, rows.at("teacher_forward_packed").value, "packed teacher");
  expect_within(kShare,
                last_stage(qwen3_4b_step("swa_learned_sink", {1, 1}), h200()).step.total(),
                rows.at("step_swa_40960").value,
                "window student");
  PlanInputs small = qwen3_4b_step("bifocal", {1, 1});
  small.config.memory.limit_gib = 79;
  small.config.optimizer.moments = "bfloat16";
  expect_within(kShare,
                last_stage(small, h200()).step.total(),
                rows.at("step_bifocal_40960_80gib").value,
                "80 GiB");
}

TEST(StepTime, TwoGpusAreWithinTenPercent) {
  constexpr double kOneGpu = 11087.0;  // tokens/s, docs/results/h200.md, of 40ff7fe as two_gpu_*
  const auto tokens_per_second = [](MeshCounts mesh) {
    PlanInputs inputs = qwen3_4b_step("bifocal", mesh);
    inputs.config.memory.recompute = "block";
    return static_cast<double>(mesh.data * 40960) / last_stage(inputs, h200()).step.total();
  };
  const double one = tokens_per_second({1, 1});
  const double data = tokens_per_second({2, 1});
  const double sequence = tokens_per_second({1, 2});
  const auto& rows = measured();
  expect_within(kShare, one, kOneGpu, "one GPU, recompute block");
  expect_within(kShare, data, kOneGpu * rows.at("two_gpu_data").value, "data");
  expect_within(kShare, sequence, kOneGpu * rows.at("two_gpu_sequence").value, "sequence");
  expect_within(kShare, data / one, rows.at("two_gpu_data").value, "speed-up by data");
  expect_within(kShare, sequence / one, rows.at("two_gpu_sequence").value, "speed-up by sequence");
}

TEST(StepTime, SumsAndUnitsAgree) {
  PlanInputs inputs = qwen3_4b_step("bifocal", {2, 4});
  inputs.config.align.steps = 100;
  const Plan plan = make_plan(inputs);
  ASSERT_EQ(plan.stages.size(), 2U);
  for (const PlannedStage& stage : plan.stages) {
    const StageTime time = predict_stage(inputs, plan, stage, h200());
    double traffic = 0.0;
    for (const Traffic& one : time.traffic) {
      EXPECT_GT(one.rank_bytes, 0.0) << one.what;
      EXPECT_FALSE(one.crosses_hosts) << one.what;
      EXPECT_EQ(one.host_bytes, 0.0) << one.what;
      traffic += one.seconds;
    }
    EXPECT_DOUBLE_EQ(time.step.communication, traffic);
    EXPECT_DOUBLE_EQ(time.days(86400), time.step.total());
    EXPECT_DOUBLE_EQ(time.gpu_hours(3600, 8), 8.0 * time.step.total());
  }
}

const Traffic& traffic_of(const StageTime& time, const std::string& what) {
  for (const Traffic& one : time.traffic) {
    if (one.what == what) {
      return one;
    }
  }
  ADD_FAILURE() << "no " << what;
  static const Traffic none;
  return none;
}

// Figures by hand: a unit's bytes, halos of W - 1 = 447 tokens, summaries of 528,448 bytes.
TEST(StepTime, TrafficIsCountedByHand) {
  PlanInputs inputs = qwen3_4b_step("bifocal", {1, 2});
  const Plan plan = make_plan(inputs);
  const StageTime time = predict_stage(inputs, plan, plan.stages.back(), h200());
  const double elements = 2.0 * static_cast<double>(plan.part_elements);
  EXPECT_DOUBLE_EQ(traffic_of(time, "student weights").rank_bytes, elements * 2.0 / 2.0);
  EXPECT_DOUBLE_EQ(traffic_of(time, "gradients").rank_bytes, elements * 4.0 / 2.0);
  EXPECT_DOUBLE_EQ(traffic_of(time, "window halo").rank_bytes, 36.0 * 4 * 447 * 1024 * 2);
  EXPECT_DOUBLE_EQ(traffic_of(time, "mLSTM states").rank_bytes,
                   36.0 * (528448 + 8 * (128 * 128 + 128 + 1) * 4));
  EXPECT_DOUBLE_EQ(traffic_of(time, "teacher hidden states").rank_bytes, 0.5 * 20480 * 2560 * 2);
  // Every second step gathers the teacher.
  EXPECT_DOUBLE_EQ(traffic_of(time, "teacher weights").rank_bytes,
                   0.5 * static_cast<double>(plan.teacher_part_elements) * 2);
  inputs.config.memory.weights = "shard";
  EXPECT_DOUBLE_EQ(traffic_of(last_stage(inputs, h200()), "student weights").rank_bytes,
                   2.0 * elements * 2.0 / 2.0);
}

TEST(StepTime, SlowerNetworksAndMoreWorkTakeLonger) {
  PlanInputs inputs = qwen3_4b_step("bifocal", {8, 8});
  inputs.config.memory.weights = "shard";
  inputs.ranks_per_node = 8;
  const auto seconds = [&](const PlanInputs& given, const MachineAssumptions& machine) {
    return last_stage(given, machine).step.total();
  };
  const double usual = seconds(inputs, h200());
  MachineAssumptions slow = h200();
  slow.network = 5e9;
  EXPECT_GT(seconds(inputs, slow), usual);
  EXPECT_LT(seconds(inputs, h200(4096)), usual);
  PlanInputs twice = inputs;
  twice.config.data.rows_per_step = 16;
  // Not twice: replicas are updated once a step.
  EXPECT_GT(seconds(twice, h200()), 1.9 * usual);
  EXPECT_LT(seconds(twice, h200()), 2.0 * usual);
  PlanInputs deeper = inputs;
  deeper.config.memory.recompute = "block";
  EXPECT_GT(seconds(deeper, h200()), usual);
  const StageTime time = last_stage(inputs, h200());
  const Traffic& gradients = traffic_of(time, "gradients");
  EXPECT_TRUE(gradients.crosses_hosts);
  EXPECT_EQ(gradients.host_bytes, gradients.rank_bytes);
  EXPECT_FALSE(traffic_of(time, "teacher weights").crosses_hosts);
  EXPECT_FALSE(traffic_of(time, "window halo").crosses_hosts);
  for (const std::string_view name : gpu_names()) {
    MachineAssumptions machine = h200();
    machine.gpu = *gpu_speed(name);
    EXPECT_GE(seconds(inputs, machine), usual) << name;
  }
  EXPECT_FALSE(gpu_speed("h2000"));
}

}  // namespace
}  // namespace bifocal
