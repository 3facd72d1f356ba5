// Counts against figures worked out by hand for one layer of the Qwen3-4B shape and a row of 40,960
// tokens in bf16.
#include "ops/cost.h"

#include <array>
#include <vector>

#include <gtest/gtest.h>

namespace bifocal {
namespace {

constexpr std::int64_t kTokens = 40960;
constexpr std::int64_t kHidden = 2560;
constexpr std::int64_t kIntermediate = 9728;
constexpr std::int64_t kHeads = 32;
constexpr std::int64_t kStates = 8;
constexpr std::int64_t kDim = 128;

ConstTensorView of(const Shape& shape, DType dtype = DType::bf16) {
  static const char nothing = 0;
  return {&nothing, dtype, shape};
}

TensorView to(const Shape& shape, DType dtype = DType::bf16) {
  static char nothing = 0;
  return {&nothing, dtype, shape};
}

// The figures have three digits.
void expect_about(double got, double wanted) {
  EXPECT_NEAR(got, wanted, 0.012 * wanted);
}

AttentionInputs attention() {
  return {.q = of({kTokens, kHeads, kDim}),
          .k = of({kTokens, kStates, kDim}),
          .v = of({kTokens, kStates, kDim}),
          .key_begin = of({kTokens}, DType::i32),
          .sink = of({kHeads})};
}

MlstmInputs mlstm() {
  return {.q = of({kTokens, kHeads, kDim}),
          .k = of({kTokens, kStates, kDim}),
          .v = of({kTokens, kStates, kDim}),
          .i_gate = of({kTokens, kStates}, DType::f32),
          .f_gate = of({kTokens, kStates}, DType::f32),
          .starts = of({kTokens}, DType::u8)};
}

TEST(Cost, ProductsOfALayerAndItsFeatureMaps) {
  OpCost all;
  for (const auto& [in, out] : {std::pair{kHidden, std::int64_t{6144}},
                                std::pair{std::int64_t{4096}, kHidden},
                                std::pair{kHidden, 2 * kIntermediate},
                                std::pair{kIntermediate, kHidden}}) {
    const LinearForward forward{
        .y = to({kTokens, out}), .x = of({kTokens, in}), .weight = of({out, in})};
    all += cost(forward);
    EXPECT_EQ(
        cost(LinearBackwardInput{
                 .d_x = to({kTokens, in}), .d_y = of({kTokens, out}), .weight = of({out, in})})
            .flop,
        cost(forward).flop);
    EXPECT_EQ(cost(LinearBackwardWeight{.d_weight = to({out, in}, DType::f32),
                                        .d_y = of({kTokens, out}),
                                        .x = of({kTokens, in})})
                  .flop,
              cost(forward).flop);
  }
  expect_about(all.flop, 8.27e12);
  OpCost maps;
  for (const std::int64_t heads : {kHeads, kStates}) {
    maps += cost(FeatureMapForward{.y = to({kTokens, heads, kDim}),
                                   .x = of({kTokens, heads, kDim}),
                                   .weight = of({heads, kDim, kDim})});
  }
  expect_about(maps.flop, 0.054e12);
  expect_about(maps.bytes, 0.84e9);
}

TEST(Cost, AttentionInAWindowAndOverTheDocument) {
  const std::array<std::int64_t, 1> row{kTokens};
  const SlidingAttentionForward forward{.out = to({kTokens, kHeads, kDim}),
                                        .lse = to({kTokens, kHeads}, DType::f32),
                                        .inputs = attention()};
  const SlidingAttentionBackward backward{.d_q = to({kTokens, kHeads, kDim}),
                                          .d_k = to({kTokens, kStates, kDim}),
                                          .d_v = to({kTokens, kStates, kDim}),
                                          .d_sink = to({kHeads}, DType::f32),
                                          .d_out = of({kTokens, kHeads, kDim}),
                                          .out = of({kTokens, kHeads, kDim}),
                                          .lse = of({kTokens, kHeads}, DType::f32),
                                          .inputs = attention()};
  const double window = visible_pairs(row, 448);
  expect_about(cost(forward, window).flop, 0.299e12);
  expect_about(cost(forward, window).bytes, 0.84e9);
  expect_about(cost(backward, window).flop, 0.748e12);
  expect_about(cost(backward, window).bytes, 1.69e9);
  expect_about(cost(forward, visible_pairs(row, 0)).flop, 13.74e12);
}

TEST(Cost, PairsOfDocumentsAreThoseOfTheirKeyRanges) {
  const std::vector<std::int64_t> documents{1, 5, 3, 11};
  for (const std::int64_t window : {0, 1, 4, 100}) {
    std::vector<std::int32_t> key_begin;
    std::int64_t start = 0;
    for (const std::int64_t tokens : documents) {
      for (std::int64_t t = start; t < start + tokens; ++t) {
        const std::int64_t first = window == 0 ? start : std::max(start, t - window + 1);
        key_begin.push_back(static_cast<std::int32_t>(first));
      }
      start += tokens;
    }
    EXPECT_EQ(visible_pairs(documents, window), visible_pairs(key_begin, start)) << window;
    // A halo of two keys that nobody sees changes nothing.
    for (std::int32_t& first : key_begin) {
      first += 2;
    }
    EXPECT_EQ(visible_pairs(documents, window), visible_pairs(key_begin, start + 2)) << window;
  }
}

TEST(Cost, MlstmByChunk) {
  const MlstmForward forward{.h = to({kTokens, kHeads, kDim}), .inputs = mlstm()};
  const MlstmBackward backward{.d_q = to({kTokens, kHeads, kDim}),
                               .d_k = to({kTokens, kStates, kDim}),
                               .d_v = to({kTokens, kStates, kDim}),
                               .d_h = of({kTokens, kHeads, kDim}),
                               .h = of({kTokens, kHeads, kDim}),
                               .inputs = mlstm()};

  struct Wanted {
    std::int64_t chunk;
    double forward_flop, forward_bytes, backward_flop, backward_bytes;
  };

  for (const Wanted& wanted : {Wanted{64, 75e9, 1.53e9, 172e9, 2.69e9},
                               Wanted{128, 97e9, 1.19e9, 226e9, 2.02e9},
                               Wanted{256, 140e9, 1.02e9, 333e9, 1.68e9}}) {
    expect_about(cost(forward, wanted.chunk).flop, wanted.forward_flop);
    expect_about(cost(forward, wanted.chunk).bytes, wanted.forward_bytes);
    expect_about(cost(backward, wanted.chunk).flop, wanted.backward_flop);
    expect_about(cost(backward, wanted.chunk).bytes, wanted.backward_bytes);
  }
}

TEST(Cost, BytesOfElementwiseOps) {
  const Shape mlp{kTokens, kIntermediate};
  expect_about(cost(SwigluForward{.y = to(mlp), .gate = of(mlp), .up = of(mlp)}).bytes, 2.39e9);
  expect_about(
      cost(SwigluBackward{
               .d_gate = to(mlp), .d_up = to(mlp), .d_y = of(mlp), .gate = of(mlp), .up = of(mlp)})
          .bytes,
      3.98e9);
  const Shape row{kTokens, kHidden};
  const RmsNormForward norm{.y = to(row), .x = of(row), .weight = of({kHidden})};
  EXPECT_EQ(cost(norm).bytes, 2.0 * (2.0 * kTokens * kHidden + kHidden));
  const RmsNormBackward back{.d_x = to(row), .d_y = of(row), .x = of(row), .weight = of({kHidden})};
  RmsNormBackward adds = back;
  adds.accumulate = true;
  EXPECT_EQ(cost(back).bytes, 2.0 * (3.0 * kTokens * kHidden + kHidden));
  EXPECT_EQ(cost(adds).bytes, 2.0 * (4.0 * kTokens * kHidden + kHidden));
  EXPECT_EQ(cost(RopeRotate{.x = to({kTokens, kHeads, kDim}),
                            .cos = of({kTokens, kDim / 2}, DType::f32),
                            .sin = of({kTokens, kDim / 2}, DType::f32)})
                .bytes,
            4.0 * kTokens * (kHeads * kDim + kDim));
}

TEST(Cost, LossAndOptimizerOfTheWholeModel) {
  constexpr std::int64_t kVocabulary = 151936;
  const Shape logits{kTokens, kVocabulary};
  const DistillLoss loss{.d_student = to(logits),
                         .student = of(logits, DType::f32),
                         .teacher = of(logits, DType::f32)};
  expect_about(cost(loss).bytes, 62.2e9);
  constexpr std::int64_t kParameters = 4'022'468'096;
  const Shape all{kParameters};
  const AdamW update{.parameter = to(all, DType::f32),
                     .first = to(all, DType::f32),
                     .second = to(all, DType::f32),
                     .gradient = of(all, DType::f32),
                     .copy = to(all)};
  EXPECT_EQ(cost(update).bytes, 30.0 * kParameters);
  expect_about(cost(SumOfSquares{.x = of(all, DType::f32)}).bytes, 16e9);
}

TEST(Cost, TheFloorIsTheLargerOfBothTimes) {
  const DeviceRates rates{.flop = 10.0, .bytes = 2.0};
  EXPECT_EQ(floor_seconds({.flop = 100.0, .bytes = 4.0}, rates), 10.0);
  EXPECT_EQ(floor_seconds({.flop = 10.0, .bytes = 4.0}, rates), 2.0);
}

}  // namespace
}  // namespace bifocal
