// Products of a few rows on the device: against the CPU ops in double, and the same bits in any
// company.
#include "ops/decode_linear.h"

#include <cmath>

#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "kernels/cuda_stream.h"
#include "support/compare.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::on_device;
using test::stored_normals;

struct Sizes {
  std::int64_t rows, in, out;
};

// Rows around the 8 and 16 of a block, inputs around the 8, 64 and 2,048 of a lane, a warp and a
// block's batch, outputs around the 16 of a block.
const Sizes kSizes[] = {{1, 1, 1},
                        {1, 8, 4},
                        {2, 7, 3},
                        {3, 64, 16},
                        {8, 72, 17},
                        {9, 512, 40},
                        {16, 2048, 33},
                        {17, 2056, 15},
                        {1, 2560, 128},
                        {1, 9728, 64},
                        {40, 24, 5},
                        {0, 8, 8},
                        {3, 0, 5}};

struct Types {
  DType result, input, weight, bias;
  int shift;
};

const Types kTypes[] = {{DType::bf16, DType::bf16, DType::bf16, DType::bf16, 0},
                        {DType::bf16, DType::bf16, DType::bf16, DType::bf16, 3},
                        {DType::f32, DType::bf16, DType::bf16, DType::bf16, 0},
                        {DType::f32, DType::bf16, DType::bf16, DType::f32, 0},
                        {DType::f32, DType::f32, DType::bf16, DType::f32, 0},
                        {DType::f32, DType::f32, DType::f32, DType::f32, 1}};

std::vector<double> magnitudes(const Sizes& s, const Tensor& x, const Tensor& weight) {
  std::vector<double> all;
  for (std::int64_t r = 0; r < s.rows; ++r) {
    for (std::int64_t o = 0; o < s.out; ++o) {
      double sum = 1.0;  // the bias
      for (std::int64_t i = 0; i < s.in; ++i) {
        sum += std::abs(x.as<double>()[r * s.in + i] * weight.as<double>()[o * s.in + i]);
      }
      all.push_back(sum);
    }
  }
  return all;
}

class CudaDecode : public testing::Test {
 protected:
  Memory memory_;
  CpuStream cpu_;
  CudaStream stream_;
};

TEST_F(CudaDecode, LinearMatchesTheCpuOp) {
  for (const Types& types : kTypes) {
    for (const Sizes& s : kSizes) {
      SCOPED_TRACE(fmt::format("{} x {}, weight {}, shifted {}; {} rows, {} in, {} out",
                               name_of(types.result),
                               name_of(types.input),
                               name_of(types.weight),
                               types.shift,
                               s.rows,
                               s.in,
                               s.out));
      const Tensor x = stored_normals(memory_, types.input, {s.rows, s.in}, 1);
      const Tensor weight = stored_normals(memory_, types.weight, {s.out, s.in}, 2);
      const Tensor bias = stored_normals(memory_, types.bias, {s.out}, 3);
      const Tensor want = memory_.empty(Region::activations, DType::f64, {s.rows, s.out});
      const DeviceTensor device_x = on_device(x, types.input, types.shift);
      const DeviceTensor device_weight = on_device(weight, types.weight, types.shift);
      const DeviceTensor device_bias = on_device(bias, types.bias, types.shift);
      for (const bool has_bias : {false, true}) {
        const Tensor no_bias;
        run(cpu_, DecodeLinear{want, x, weight, has_bias ? bias : no_bias});
        const DeviceTensor y(types.result, want.shape(), types.shift);
        DecodeLinear op{y.view(), device_x.view(), device_weight.view(), {}};
        if (has_bias) {
          op.bias = device_bias.view();
        }
        op.check();
        run(stream_, op);
        // A lane or a warp adds an eighth of the terms at most; tensor cores cut low digits off.
        const double roundoffs = 4.0 * std::sqrt(static_cast<double>(s.in)) + 8.0;
        test::expect_close(
            y.download(stream_), want, types.result, roundoffs, magnitudes(s, x, weight));
      }
    }
  }
}

struct Heads {
  std::int64_t rows, heads, x_heads, dim;
};

const Heads kHeads[] = {
    {1, 2, 1, 64}, {3, 4, 2, 128}, {9, 2, 2, 256}, {16, 8, 2, 128}, {0, 2, 1, 64}, {5, 3, 3, 20}};

TEST_F(CudaDecode, FeatureMapMatchesTheCpuOp) {
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const Heads& h : kHeads) {
      SCOPED_TRACE(fmt::format("{} shifted {}; {} rows, {} of {} heads of {}",
                               name_of(stored),
                               shift,
                               h.rows,
                               h.heads,
                               h.x_heads,
                               h.dim));
      const double deviation = 1.0 / std::sqrt(static_cast<double>(h.dim));
      const Tensor x = stored_normals(memory_, stored, {h.rows, h.x_heads, h.dim}, 1);
      const Tensor weight = stored_normals(memory_, stored, {h.heads, h.dim, h.dim}, 2, deviation);
      const Tensor want = memory_.empty(Region::activations, DType::f64, {h.rows, h.heads, h.dim});
      run(cpu_, DecodeFeatureMap{want, x, weight});
      const DeviceTensor y(stored, want.shape(), shift);
      const DeviceTensor device_x = on_device(x, stored, shift);
      const DeviceTensor device_weight = on_device(weight, stored, shift);
      const DecodeFeatureMap op{y.view(), device_x.view(), device_weight.view()};
      op.check();
      run(stream_, op);
      // As for the features of whole rows: an error in a logit is as much in the feature.
      test::expect_close(y.download(stream_), want, stored, 300);
    }
  }
}

// Each row alone, the first eight, and all of them: the same bits, and again.
TEST_F(CudaDecode, ARowHasTheSameBitsInAnyCompany) {
  for (const DType stored : {DType::f32, DType::bf16}) {
    const Sizes s{21, 1000, 75};
    const DeviceTensor x = on_device(stored_normals(memory_, stored, {s.rows, s.in}, 1), stored, 0);
    const DeviceTensor weight =
        on_device(stored_normals(memory_, DType::bf16, {s.out, s.in}, 2), DType::bf16, 0);
    const Tensor map_values = stored_normals(memory_, DType::bf16, {6, 128, 128}, 3, 0.1);
    const DeviceTensor map = on_device(map_values, DType::bf16, 0);
    const DeviceTensor heads =
        on_device(stored_normals(memory_, stored, {s.rows, 3, 128}, 4), stored, 0);
    const DeviceTensor y(stored, {s.rows, s.out}, 0);
    const DeviceTensor features(stored, {s.rows, 6, 128}, 0);
    const auto call = [&](std::int64_t begin, std::int64_t end) {
      run(stream_,
          DecodeLinear{y.view().rows(begin, end), x.view().rows(begin, end), weight.view(), {}});
      run(stream_,
          DecodeFeatureMap{
              features.view().rows(begin, end), heads.view().rows(begin, end), map.view()});
    };
    call(0, s.rows);
    const std::vector<double> want = y.download(stream_);
    const std::vector<double> want_features = features.download(stream_);
    for (int repeat = 0; repeat < 30; ++repeat) {
      if (repeat % 3 == 0) {
        call(0, s.rows);
      } else if (repeat % 3 == 1) {
        call(0, 8);
        call(8, s.rows);
      } else {
        for (std::int64_t r = 0; r < s.rows; ++r) {
          call(r, r + 1);
        }
      }
      ASSERT_TRUE(y.download(stream_) == want) << name_of(stored) << " repeat " << repeat;
      ASSERT_TRUE(features.download(stream_) == want_features)
          << name_of(stored) << " repeat " << repeat;
    }
  }
}

}  // namespace
}  // namespace bifocal
