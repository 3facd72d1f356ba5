// Times of the ops that wait for memory at the shape of Qwen3-4B, in bfloat16 beside float32 sums.
#include <vector>

#include "cuda/speed.h"
#include "ops/adamw.h"
#include "ops/bifocal_gate.h"
#include "ops/elementwise.h"
#include "ops/fill.h"
#include "ops/fused_norm.h"
#include "ops/reduce.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"
#include "ops/sample.h"
#include "ops/swiglu.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::kSpeedHeadDim;
using test::kSpeedHeads;
using test::kSpeedHidden;
using test::kSpeedIntermediate;
using test::kSpeedKvHeads;
using test::kSpeedTokens;
using test::numbers_on_device;
using test::speed_tensor;

class CudaMemorySpeed : public test::CudaSpeed {};

double bytes(const DeviceTensor& x) {
  return static_cast<double>(x.view().bytes());
}

DeviceTensor halves(const Shape& shape, std::uint64_t seed) {
  return speed_tensor(DType::bf16, shape, seed);
}

TEST_F(CudaMemorySpeed, Norms) {
  const Shape hidden{kSpeedTokens, kSpeedHidden};
  for (const auto& [name, shape] :
       {std::pair{"hidden", hidden},
        {"32 heads", Shape{kSpeedTokens * kSpeedHeads, kSpeedHeadDim}},
        {"8 heads", Shape{kSpeedTokens * kSpeedKvHeads, kSpeedHeadDim}}}) {
    const DeviceTensor x = halves(shape, 1);
    const DeviceTensor d_y = halves(shape, 2);
    const DeviceTensor weight = halves({shape[1]}, 3);
    const DeviceTensor y(DType::bf16, shape, 0);
    const DeviceTensor d_weight = speed_tensor(DType::f32, {shape[1]}, 4);
    measure_op(fmt::format("RMSNorm forward, {}", name),
               2.0 * bytes(x),
               0.0,
               RmsNormForward{y.view(), x.view(), weight.view()});
    RmsNormBackward back{y.view(), d_weight.view(), d_y.view(), x.view(), weight.view()};
    measure_op(fmt::format("RMSNorm backward, {}", name), 3.0 * bytes(x), 0.0, back);
    back.accumulate = true;
    measure_op(fmt::format("RMSNorm backward, added, {}", name), 4.0 * bytes(x), 0.0, back);
  }
  const DeviceTensor a = halves(hidden, 5);
  const DeviceTensor b = halves(hidden, 6);
  const DeviceTensor z(DType::bf16, hidden, 0);
  const DeviceTensor weight = halves({kSpeedHidden}, 7);
  const DeviceTensor y(DType::bf16, hidden, 0);
  measure_op("add + RMSNorm",
             4.0 * bytes(a),
             0.0,
             AddRmsNorm{y.view(), z.view(), a.view(), b.view(), weight.view()});
}

TEST_F(CudaMemorySpeed, Rotation) {
  constexpr std::int64_t kHalf = kSpeedHeadDim / 2;
  std::vector<std::int32_t> numbers;
  for (std::int64_t t = 0; t < kSpeedTokens; ++t) {
    numbers.push_back(static_cast<std::int32_t>(t));
  }
  const DeviceTensor positions = numbers_on_device(numbers);
  const DeviceTensor frequencies = numbers_on_device(rope_frequencies(kSpeedHeadDim, 1e6, {}));
  const DeviceTensor cos(DType::f32, {kSpeedTokens, kHalf}, 0);
  const DeviceTensor sin(DType::f32, {kSpeedTokens, kHalf}, 0);
  measure_op("rotary table",
             2.0 * bytes(cos),
             0.0,
             RopeTable{cos.view(), sin.view(), positions.view(), frequencies.view()});
  const DeviceTensor weight = halves({kSpeedHeadDim}, 3);
  for (const std::int64_t heads : {kSpeedHeads, kSpeedKvHeads}) {
    const DeviceTensor x = halves({kSpeedTokens, heads, kSpeedHeadDim}, 1);
    const DeviceTensor y(DType::bf16, x.view().shape, 0);
    measure_op(fmt::format("rotation, {} heads", heads),
               2.0 * bytes(x) + 2.0 * bytes(cos),
               0.0,
               RopeRotate{x.view(), cos.view(), sin.view()});
    measure_op(fmt::format("RMSNorm + rotation, {} heads", heads),
               2.0 * bytes(x) + 2.0 * bytes(cos),
               0.0,
               NormRope{y.view(), x.view(), weight.view(), cos.view(), sin.view()});
  }
}

TEST_F(CudaMemorySpeed, Elementwise) {
  const Shape hidden{kSpeedTokens, kSpeedHidden};
  const DeviceTensor a = halves(hidden, 1);
  const DeviceTensor b = halves(hidden, 2);
  const DeviceTensor y(DType::bf16, hidden, 0);
  measure_op("add", 3.0 * bytes(a), 0.0, Add{y.view(), a.view(), b.view()});
  const DeviceTensor wide = speed_tensor(DType::f32, hidden, 3);
  measure_op(
      "cast of float32 to bfloat16", bytes(wide) + bytes(y), 0.0, Cast{y.view(), wide.view()});
  measure_op(
      "cast of bfloat16 to float32", bytes(wide) + bytes(y), 0.0, Cast{wide.view(), y.view()});
  measure_op("zero", bytes(wide), 0.0, Zero{wide.view()});
  measure_op("fill", bytes(wide), 0.0, Fill{wide.view(), 0.5});
  measure_op("fill with normals", bytes(wide), 0.0, FillNormal{wide.view(), 1, 2, 0, 0.02});

  const Shape inner{kSpeedTokens, kSpeedIntermediate};
  const DeviceTensor gate = halves(inner, 4);
  const DeviceTensor up = halves(inner, 5);
  const DeviceTensor d_y = halves(inner, 6);
  const DeviceTensor d_gate(DType::bf16, inner, 0);
  const DeviceTensor d_up(DType::bf16, inner, 0);
  measure_op("SwiGLU forward",
             3.0 * bytes(gate),
             0.0,
             SwigluForward{d_gate.view(), gate.view(), up.view()});
  measure_op("SwiGLU backward",
             5.0 * bytes(gate),
             0.0,
             SwigluBackward{d_gate.view(), d_up.view(), d_y.view(), gate.view(), up.view()});
}

TEST_F(CudaMemorySpeed, BifocalGate) {
  const Shape shape{kSpeedTokens, kSpeedHeads, kSpeedHeadDim};
  const DeviceTensor far = halves(shape, 1);
  const DeviceTensor near = halves(shape, 2);
  const DeviceTensor gate = halves({kSpeedTokens, kSpeedHeads}, 3);
  const DeviceTensor d_y = halves(shape, 4);
  const DeviceTensor d_far(DType::bf16, shape, 0);
  const DeviceTensor d_near(DType::bf16, shape, 0);
  const DeviceTensor d_gate(DType::bf16, gate.view().shape, 0);
  measure_op("gate forward",
             3.0 * bytes(far) + bytes(gate),
             0.0,
             BifocalGateForward{d_far.view(), far.view(), near.view(), gate.view()});
  measure_op("gate backward",
             5.0 * bytes(far) + 2.0 * bytes(gate),
             0.0,
             BifocalGateBackward{d_far.view(),
                                 d_near.view(),
                                 d_gate.view(),
                                 d_y.view(),
                                 far.view(),
                                 near.view(),
                                 gate.view()});
}

// A unit of a hundred million parameters.
TEST_F(CudaMemorySpeed, Optimizer) {
  constexpr std::int64_t kSize = 100'000'000;
  const DeviceTensor parameter = speed_tensor(DType::f32, {kSize + 1}, 1, 0.02);
  const DeviceTensor gradient = speed_tensor(DType::f32, {kSize + 1}, 2);
  const DeviceTensor copy(DType::bf16, {kSize + 1}, 0);
  const DeviceTensor sum = numbers_on_device<double>({0.0});
  for (const DType moments : {DType::f32, DType::bf16}) {
    const DeviceTensor first = speed_tensor(moments, {kSize + 1}, 3, 0.01);
    const DeviceTensor second = speed_tensor(moments, {kSize + 1}, 4, 0.01, 0.0, true);
    for (const std::int64_t begin : {0, 1}) {
      const auto range = [&](const DeviceTensor& x) { return x.view().rows(begin, begin + kSize); };
      measure_op(fmt::format("AdamW, moments {}, from element {}", name_of(moments), begin),
                 kSize * (14.0 + 4.0 * static_cast<double>(size_of(moments))),
                 0.0,
                 AdamW{.parameter = range(parameter),
                       .first = range(first),
                       .second = range(second),
                       .gradient = range(gradient),
                       .copy = range(copy),
                       .rate = 1e-4});
    }
  }
  measure_op("sum of squares", bytes(gradient), 0.0, SumOfSquares{sum.view(), gradient.view()});
  measure_op("sum of squares, from element 1",
             bytes(gradient),
             0.0,
             SumOfSquares{sum.view(), gradient.view().rows(1, kSize + 1)});
  std::vector<double> losses(kSpeedTokens, 1.5);
  std::vector<std::uint8_t> flags(kSpeedTokens, 1);
  const DeviceTensor x = numbers_on_device(losses);
  const DeviceTensor keep = numbers_on_device(flags);
  measure_op(
      "sum of kept", bytes(x) + bytes(keep), 0.0, KeptSum{sum.view(), x.view(), keep.view()});
}

TEST_F(CudaMemorySpeed, Sampling) {
  constexpr std::int64_t kVocabulary = 151936;
  for (const std::int64_t rows : {1, 16}) {
    const DeviceTensor logits = speed_tensor(DType::f32, {rows, kVocabulary}, 1, 3.0);
    const DeviceTensor ids(DType::i32, {rows}, 0);
    const std::vector<std::int64_t> numbers(static_cast<std::size_t>(rows), 7);
    const DeviceTensor streams = numbers_on_device(numbers);
    Sample op{.ids = ids.view(),
              .logits = logits.view(),
              .seed = 1,
              .streams = streams.view(),
              .indices = streams.view()};
    measure_op(fmt::format("greedy, {} rows", rows), bytes(logits), 0.0, op);
    op.temperature = 0.6;
    measure_op(fmt::format("temperature, {} rows", rows), bytes(logits), 0.0, op);
    op.top_p = 0.95;
    measure_op(fmt::format("temperature, top_p, {} rows", rows), bytes(logits), 0.0, op);
    op.top_k = 20;
    measure_op(fmt::format("temperature, top_k, top_p, {} rows", rows), bytes(logits), 0.0, op);
  }
}

}  // namespace
}  // namespace bifocal
