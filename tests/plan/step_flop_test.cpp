// Operations of whole steps at the Qwen3-4B shape, against figures worked out by hand, and against
// the ops' own counts.
#include "plan/step_flop.h"

#include <vector>

#include <gtest/gtest.h>

#include "ops/cost.h"

namespace bifocal {
namespace {

ModelConfig qwen3_4b(const MixerSettings& mixer) {
  ModelConfig model{.vocabulary = 151936,
                    .hidden = 2560,
                    .intermediate = 9728,
                    .layers = 36,
                    .heads = 32,
                    .kv_heads = 8,
                    .head_dim = 128,
                    .qk_norm = true};
  model.mixers.assign(36, mixer);
  return model;
}

constexpr MixerSettings kBifocal{.window = 448, .sink = Sink::learned, .states = States::kv};

TEST(StepFlop, OfABifocalStepOfOneLongDocument) {
  const ModelConfig teacher = qwen3_4b({});
  const ModelConfig student = qwen3_4b(kBifocal);
  const std::vector<std::int64_t> row{40960};
  const StepFlop flop = step_flop(student, &teacher, row);
  // 1,862 T without feature maps and gates, 2,174 T with a recomputed forward pass; those two add
  // 36 x 3 x 0.063 T = 6.8 T, and 2.3 T.
  EXPECT_NEAR(flop.total(), 1862e12 + 6.8e12, 3e12);
  EXPECT_NEAR(flop.total() + flop.recomputed, 2174e12 + 9.1e12, 3e12);
  EXPECT_NEAR(flop.teacher_forward, 36 * (8.27e12 + 13.74e12), 1e12);
  EXPECT_NEAR(flop.head, 127.5e12, 0.1e12);
}

TEST(StepFlop, OfALayerIsTheSumOfItsOps) {
  const ModelConfig model = qwen3_4b(kBifocal);
  const std::vector<std::int64_t> documents{100, 7, 4096, 900};
  constexpr std::int64_t kTokens = 100 + 7 + 4096 + 900;
  const LayerFlop flop = layer_flop(model, kBifocal, documents);
  const ConstTensorView q{nullptr, DType::bf16, {kTokens, 32, 128}};
  const ConstTensorView k{nullptr, DType::bf16, {kTokens, 8, 128}};
  const SlidingAttentionForward attention{.inputs = {.q = q, .k = k, .v = k}};
  EXPECT_EQ(flop.attention, cost(attention, visible_pairs(documents, 448)).flop);
  const MlstmForward mlstm{.inputs = {.q = q, .k = k, .v = k}};
  const MlstmBackward mlstm_backward{.inputs = {.q = q, .k = k, .v = k}};
  EXPECT_EQ(flop.mlstm, cost(mlstm, kCountedChunk).flop);
  EXPECT_EQ(layer_backward_flop(model, kBifocal, documents).mixer(),
            2.0 * flop.projections + 2.5 * flop.attention + 2.0 * flop.features +
                cost(mlstm_backward, kCountedChunk).flop);
}

TEST(StepFlop, AlignLeavesOutWhatDoesNotTrain) {
  const ModelConfig teacher = qwen3_4b({});
  const ModelConfig student = qwen3_4b(kBifocal);
  const std::vector<std::int64_t> row{1024};
  const StepFlop few = align_flop(student, teacher, row, false);
  const StepFlop many = align_flop(student, teacher, row, true);
  const LayerFlop layer = layer_flop(student, kBifocal, row);
  EXPECT_EQ(few.teacher_forward, many.teacher_forward);
  EXPECT_EQ(few.head, 0.0);
  EXPECT_NEAR(many.student_backward - few.student_backward,
              36.0 * (2.0 * layer.projections + 2.5 * layer.attention),
              1e-9 * many.student_backward);
}

}  // namespace
}  // namespace bifocal
