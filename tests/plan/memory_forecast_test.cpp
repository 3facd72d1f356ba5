// What the forecast must say by arithmetic alone; tests/train holds it against real steps.
#include "plan/memory_forecast.h"

#include <limits>

#include <gtest/gtest.h>

namespace bifocal {
namespace {

ModelConfig small_model() {
  ModelConfig model;
  model.vocabulary = 256;
  model.hidden = 64;
  model.intermediate = 128;
  model.layers = 3;
  model.heads = 4;
  model.kv_heads = 2;
  model.head_dim = 16;
  model.max_position = 65536;
  model.mixers.assign(3, MixerSettings{.window = 32, .sink = Sink::learned});
  return model;
}

ModelConfig teacher_of(ModelConfig model) {
  model.mixers.assign(model.mixers.size(), MixerSettings{});
  return model;
}

RunConfig small_run() {
  RunConfig config;
  config.data.row_tokens = 512;
  config.memory.logit_chunk = 100;
  return config;
}

PeakBytes forecast(const RunConfig& config,
                   const ModelConfig& student,
                   const MeshCounts& mesh,
                   StageKind stage,
                   TeacherPlacement work = TeacherPlacement::look_ahead) {
  const ModelConfig teacher = teacher_of(student);
  return forecast_memory(
      {.config = config,
       .student = student,
       .teacher = stage == StageKind::pretrain ? nullptr : &teacher,
       .mesh = mesh,
       .node_ranks = mesh.data * mesh.sequence,
       .work = work,
       .recompute = config.memory.recompute == "auto" ? Recompute::none
                                                      : recompute_named(config.memory.recompute)},
      stage,
      0);
}

// Bytes of all units with the padding of `ranks` parts, each in whole blocks of 64 bytes.
std::int64_t all_units(const ModelConfig& model, std::int64_t ranks, std::int64_t element = 4) {
  const ParameterTable table(model);
  std::int64_t bytes = 0;
  for (std::int64_t unit = 0; unit <= table.final_unit(); ++unit) {
    bytes += (element * padded_unit_size(table, unit, ranks) + 63) / 64 * 64;
  }
  return bytes;
}

constexpr std::int64_t kSums = 64;  // two losses and five units' squares, in one block

// Four doubles a token, each tensor in whole blocks of 64 bytes; and an empty tensor of no narrow
// gradient.
std::int64_t token_losses(std::int64_t tokens) {
  return 4 * ((8 * tokens + 63) / 64 * 64) + 64;
}

TEST(MemoryForecast, PersistentRegionsAreSumsOfParts) {
  for (const std::int64_t ranks : {1, 2, 3, 8}) {
    const PeakBytes peak = forecast(small_run(), small_model(), {1, ranks}, StageKind::distill);
    const std::int64_t units = all_units(small_model(), ranks);
    EXPECT_EQ(peak.of(Region::weights), units);
    EXPECT_EQ(peak.of(Region::optimizer), 2 * units / ranks);
    const std::int64_t tokens = (511 + ranks) / ranks;
    EXPECT_EQ(peak.of(Region::loss),
              2 * 4 * std::min<std::int64_t>(100, tokens) * 256 + kSums + token_losses(tokens))
        << ranks;
  }
}

TEST(MemoryForecast, ShardedWeightsAreAPartAndTheTwoLargestNeighbours) {
  RunConfig config = small_run();
  config.memory.weights = "shard";
  const ModelConfig model = small_model();
  const PeakBytes peak = forecast(config, model, {1, 4}, StageKind::distill);
  const ParameterTable table(model);
  const std::int64_t pair = padded_unit_size(table, table.layer_unit(0), 4) +
                            padded_unit_size(table, table.layer_unit(1), 4);
  EXPECT_EQ(peak.of(Region::weights), all_units(model, 4) / 4 + 4 * pair);
}

TEST(MemoryForecast, GradientsHoldTheTiedEmbeddingALayerAndTheOneBeforeIt) {
  const ModelConfig model = small_model();
  const PeakBytes peak = forecast(small_run(), model, {2, 1}, StageKind::distill);
  const ParameterTable table(model);
  const std::int64_t open = padded_unit_size(table, table.embedding_unit(), 2) +
                            padded_unit_size(table, table.layer_unit(0), 2) +
                            padded_unit_size(table, table.layer_unit(1), 2);
  EXPECT_EQ(peak.of(Region::gradients), all_units(model, 2) / 2 + 4 * open);
}

TEST(MemoryForecast, RecomputedBlocksKeepOneWidthALayer) {
  RunConfig kept = small_run();
  RunConfig recomputed = small_run();
  recomputed.memory.recompute = "block";
  ModelConfig deep = small_model();
  deep.layers = 13;
  deep.mixers.assign(13, deep.mixers.front());
  const auto growth = [&](const RunConfig& config) {
    return forecast(config, deep, {1, 1}, StageKind::distill).of(Region::activations) -
           forecast(config, small_model(), {1, 1}, StageKind::distill).of(Region::activations);
  };
  const ModelConfig model = small_model();
  EXPECT_EQ(growth(recomputed), 10 * 4 * 512 * model.hidden);
  // Inputs, two norms and the middle; q, k, v; near and lse; gate, up and act.
  const std::int64_t width = 4 * model.hidden + 2 * model.attention_width() + 2 * model.kv_width() +
                             model.heads + 3 * model.intermediate;
  EXPECT_EQ(growth(kept), 10 * (4 * 512 * width + 2 * 64));  // and two blocks for no pinned tokens
}

TEST(MemoryForecast, HalosAndSummariesCrossRanksOnly) {
  ModelConfig model = small_model();
  model.mixers.assign(3, MixerSettings{.window = 32, .states = States::kv});
  EXPECT_EQ(forecast(small_run(), model, {1, 1}, StageKind::distill).of(Region::communication), 0);
  EXPECT_EQ(forecast(small_run(), model, {4, 1}, StageKind::distill).of(Region::communication), 0);
  // Four summaries of two states C, n, m, g; a halo of 31 keys is smaller.
  EXPECT_EQ(forecast(small_run(), model, {1, 4}, StageKind::distill).of(Region::communication),
            4 * 4 * 2 * (16 * 16 + 16 + 2));
}

TEST(MemoryForecast, UlyssesHoldsAShardWhereLookAheadHoldsARow) {
  const ModelConfig model = small_model();
  const MeshCounts mesh{1, 2};
  const PeakBytes ahead = forecast(small_run(), model, mesh, StageKind::align);
  const PeakBytes heads =
      forecast(small_run(), model, mesh, StageKind::align, TeacherPlacement::ulysses);
  EXPECT_LT(heads.of(Region::activations), ahead.of(Region::activations));
  EXPECT_EQ(ahead.of(Region::communication), 0);
  EXPECT_GT(heads.of(Region::communication), 0);
}

// A GPU in bfloat16: weights 2 bytes, master 4, two moments 8 or 4, gradients 4; logits in float32
// with their gradient in bfloat16.
TEST(MemoryForecast, NarrowWeightsHaveMastersAndSumsInFloat32) {
  RunConfig config = small_run();
  config.run.device = "cuda";
  const ModelConfig model = small_model();
  const std::int64_t units = all_units(model, 1);
  const std::int64_t narrow = all_units(model, 1, 2);
  const auto peak_of = [&](const char* moments) {
    config.optimizer.moments = moments;
    return forecast(config, model, {1, 1}, StageKind::distill);
  };
  const PeakBytes wide = peak_of("float32");
  EXPECT_EQ(wide.of(Region::weights), narrow);
  EXPECT_EQ(wide.of(Region::gradients), units);
  EXPECT_EQ(wide.of(Region::optimizer), 3 * units);
  EXPECT_EQ(peak_of("bfloat16").of(Region::optimizer), units + 2 * narrow);
  EXPECT_EQ(peak_of("host").of(Region::optimizer), units);
  EXPECT_EQ(wide.of(Region::loss), (4 + 4 + 2) * 100 * 256 + kSums + token_losses(512) - 64);
}

TEST(MemoryForecast, EachLevelKeepsLessThanTheOneBefore) {
  ModelConfig model = small_model();
  model.layers = 5;
  model.mixers.assign(5, MixerSettings{.window = 32, .states = States::kv});
  const ModelConfig teacher = teacher_of(model);
  std::int64_t before = std::numeric_limits<std::int64_t>::max();
  for (const RecomputePlan& plan : recompute_plans(model.layers)) {
    const PeakBytes peak = forecast_memory({.config = small_run(),
                                            .student = model,
                                            .teacher = &teacher,
                                            .mesh = {1, 1},
                                            .recompute = plan},
                                           StageKind::distill,
                                           0);
    EXPECT_LE(peak.total, before) << name_of(plan.level) << " " << plan.richer_layers;
    before = peak.total;
  }
}

TEST(MemoryForecast, PretrainingHoldsNoTeacher) {
  const PeakBytes peak = forecast(small_run(), small_model(), {1, 1}, StageKind::pretrain);
  EXPECT_EQ(peak.of(Region::teacher_weights), 0);
  // The smallest block for no teacher logits, another for no narrow gradient.
  EXPECT_EQ(peak.of(Region::loss), 4 * 100 * 256 + 2 * 64 + kSums + token_losses(512) - 64);
}

TEST(MemoryForecast, TheTotalIsAtMostTheSumOfTheRegions) {
  const PeakBytes peak = forecast(small_run(), small_model(), {2, 2}, StageKind::distill);
  std::int64_t sum = 0;
  for (const std::int64_t region : peak.regions) {
    sum += region;
    EXPECT_LE(region, peak.total);
  }
  EXPECT_LE(peak.total, sum);
}

}  // namespace
}  // namespace bifocal
