// Matrix products on the device against their CPU ops in double.
#include "ops/linear.h"

#include <cmath>

#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "kernels/cuda_stream.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::on_device;
using test::stored_normals;

struct Sizes {
  std::int64_t rows, in, out;
};

std::string describe(const Sizes& s) {
  return fmt::format("{} rows, {} in, {} out", s.rows, s.in, s.out);
}

// One, none, the widths of gates, and what is no multiple of 8.
const Sizes kSizes[] = {{1, 1, 1},
                        {0, 8, 8},
                        {3, 0, 5},
                        {5, 7, 3},
                        {1, 64, 8},
                        {130, 64, 8},
                        {130, 96, 32},
                        {17, 40, 257},
                        {64, 128, 64},
                        {257, 73, 130},
                        {1, 512, 512},
                        {1000, 8, 32},
                        {700, 1280, 8}};

// Types of operands and of the result.
struct Types {
  DType stored, result;
  int shift;
};

const Types kForwardTypes[] = {{DType::f32, DType::f32, 0},
                               {DType::f32, DType::f32, 1},
                               {DType::bf16, DType::bf16, 0},
                               {DType::bf16, DType::bf16, 3},
                               {DType::bf16, DType::f32, 0},
                               {DType::bf16, DType::f32, 1}};

std::string describe(const Types& t) {
  return fmt::format("{} to {}, shifted {}", name_of(t.stored), name_of(t.result), t.shift);
}

Tensor absolute(Memory& memory, const Tensor& x) {
  Tensor y = memory.empty(Region::activations, DType::f64, x.shape());
  for (std::int64_t i = 0; i < x.size(); ++i) {
    y.as<double>()[i] = std::abs(x.as<double>()[i]);
  }
  return y;
}

std::vector<double> values_of(const Tensor& x) {
  return {x.as<double>(), x.as<double>() + x.size()};
}

// Errors of so many additions of random sign, in roundoffs of the sum of magnitudes; four
// deviations. Rounding the operands to TF32 would be far outside for narrow ones.
double roundoffs(std::int64_t terms) {
  return 4.0 * std::sqrt(static_cast<double>(terms)) + 8.0;
}

// What is there already (a bias, an earlier gradient) may be added to a product that was rounded to
// bfloat16: two more halves of its last place.
double with_sum(double roundoffs, DType result) {
  constexpr double kBfloat16 = 65536.0;
  return result == DType::bf16 ? roundoffs + kBfloat16 : roundoffs;
}

class CudaLinear : public testing::Test {
 protected:
  Tensor normals(DType stored, const Shape& shape, std::uint64_t seed) {
    return stored_normals(memory_, stored, shape, seed);
  }

  void forward(const Sizes& s, const Types& types, bool has_bias) {
    const Tensor x = normals(types.stored, {s.rows, s.in}, 1);
    const Tensor weight = normals(types.stored, {s.out, s.in}, 2);
    const Tensor bias = normals(types.stored, {s.out}, 3);
    const Tensor want = memory_.empty(Region::activations, DType::f64, {s.rows, s.out});
    const Tensor magnitude = memory_.empty(Region::activations, DType::f64, {s.rows, s.out});
    const Tensor no_bias;
    run(cpu_, LinearForward{want, x, weight, has_bias ? bias : no_bias});
    const Tensor positive_bias = absolute(memory_, bias);
    run(cpu_,
        LinearForward{magnitude,
                      absolute(memory_, x),
                      absolute(memory_, weight),
                      has_bias ? positive_bias : no_bias});
    const DeviceTensor y(types.result, {s.rows, s.out}, types.shift);
    const DeviceTensor device_x = on_device(x, types.stored, types.shift);
    const DeviceTensor device_weight = on_device(weight, types.stored, types.shift);
    const DeviceTensor device_bias = on_device(bias, types.stored, types.shift);
    LinearForward op{y.view(), device_x.view(), device_weight.view(), {}};
    if (has_bias) {
      op.bias = device_bias.view();
    }
    op.check();
    run(stream_, op);
    const double bound = roundoffs(s.in);
    test::expect_close(y.download(stream_),
                       want,
                       types.result,
                       has_bias ? with_sum(bound, types.result) : bound,
                       values_of(magnitude));
  }

  void backward_input(const Sizes& s, DType stored, int shift, bool accumulate) {
    const Tensor d_y = normals(stored, {s.rows, s.out}, 4);
    const Tensor weight = normals(stored, {s.out, s.in}, 5);
    const Tensor want = normals(stored, {s.rows, s.in}, 6);
    const DeviceTensor d_x = on_device(want, stored, shift);
    const Tensor magnitude = absolute(memory_, want);
    run(cpu_, LinearBackwardInput{want, d_y, weight, accumulate});
    run(cpu_,
        LinearBackwardInput{
            magnitude, absolute(memory_, d_y), absolute(memory_, weight), accumulate});
    const DeviceTensor device_d_y = on_device(d_y, stored, shift);
    const DeviceTensor device_weight = on_device(weight, stored, shift);
    const LinearBackwardInput op{d_x.view(), device_d_y.view(), device_weight.view(), accumulate};
    op.check();
    run(stream_, op);
    const double bound = roundoffs(s.out);
    test::expect_close(d_x.download(stream_),
                       want,
                       stored,
                       accumulate ? with_sum(bound, stored) : bound,
                       values_of(magnitude));
  }

  void backward_weight(const Sizes& s, DType stored, int shift) {
    const Tensor d_y = normals(stored, {s.rows, s.out}, 7);
    const Tensor x = normals(stored, {s.rows, s.in}, 8);
    const Tensor want = normals(DType::f32, {s.out, s.in}, 9);
    const Tensor want_bias = normals(DType::f32, {s.out}, 10);
    const DeviceTensor d_weight = on_device(want, DType::f32, shift);
    const DeviceTensor d_bias = on_device(want_bias, DType::f32, shift);
    const Tensor magnitude = absolute(memory_, want);
    const Tensor magnitude_bias = absolute(memory_, want_bias);
    run(cpu_, LinearBackwardWeight{want, want_bias, d_y, x});
    run(cpu_,
        LinearBackwardWeight{
            magnitude, magnitude_bias, absolute(memory_, d_y), absolute(memory_, x)});
    const DeviceTensor device_d_y = on_device(d_y, stored, shift);
    const DeviceTensor device_x = on_device(x, stored, shift);
    const LinearBackwardWeight op{
        d_weight.view(), d_bias.view(), device_d_y.view(), device_x.view()};
    op.check();
    run(stream_, op);
    const double bound = roundoffs(s.rows);
    test::expect_close(d_weight.download(stream_), want, DType::f32, bound, values_of(magnitude));
    test::expect_close(
        d_bias.download(stream_), want_bias, DType::f32, bound, values_of(magnitude_bias));
  }

  Memory memory_;
  CpuStream cpu_;
  CudaStream stream_;
};

TEST_F(CudaLinear, ForwardMatchesTheCpuOp) {
  for (const Types& types : kForwardTypes) {
    for (const Sizes& s : kSizes) {
      for (const bool has_bias : {false, true}) {
        SCOPED_TRACE(fmt::format("{}; {}; bias {}", describe(types), describe(s), has_bias));
        forward(s, types, has_bias);
      }
    }
  }
}

TEST_F(CudaLinear, InputGradientMatchesTheCpuOp) {
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const Sizes& s : kSizes) {
      for (const bool accumulate : {false, true}) {
        SCOPED_TRACE(fmt::format(
            "{} shifted {}; {}; accumulate {}", name_of(stored), shift, describe(s), accumulate));
        backward_input(s, stored, shift, accumulate);
      }
    }
  }
}

TEST_F(CudaLinear, WeightGradientMatchesTheCpuOp) {
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const Sizes& s : kSizes) {
      SCOPED_TRACE(fmt::format("{} shifted {}; {}", name_of(stored), shift, describe(s)));
      backward_weight(s, stored, shift);
    }
  }
}

// 1 + 2^-12 has more digits than TF32, and the sums are exact in float32.
TEST_F(CudaLinear, Float32KeepsAllDigitsOfItsOperands) {
  const std::int64_t size = 128;
  const Tensor x = memory_.empty(Region::activations, DType::f64, {size, size});
  const Tensor weight = memory_.empty(Region::activations, DType::f64, {size, size});
  std::fill_n(x.as<double>(), x.size(), 1.0 + std::ldexp(1.0, -12));
  std::fill_n(weight.as<double>(), weight.size(), 1.0);
  const DeviceTensor device_x = on_device(x, DType::f32, 0);
  const DeviceTensor device_weight = on_device(weight, DType::f32, 0);
  const DeviceTensor y(DType::f32, {size, size}, 0);
  const std::vector<double> want(static_cast<std::size_t>(size * size),
                                 128.0 * (1.0 + std::ldexp(1.0, -12)));
  run(stream_, LinearForward{y.view(), device_x.view(), device_weight.view(), {}});
  EXPECT_EQ(y.download(stream_), want);
  run(stream_, LinearBackwardInput{y.view(), device_x.view(), device_weight.view(), false});
  EXPECT_EQ(y.download(stream_), want);
}

// Long sums of few results, which the library cuts into parts.
TEST_F(CudaLinear, AlternatingInputsGiveTheSameBitsEveryTime) {
  for (const DType stored : {DType::f32, DType::bf16}) {
    for (const Sizes& s : {Sizes{2048, 256, 8}, Sizes{96, 2560, 136}, Sizes{515, 67, 259}}) {
      SCOPED_TRACE(fmt::format("{}; {}", name_of(stored), describe(s)));
      std::vector<DeviceTensor> x;
      std::vector<DeviceTensor> d_y;
      for (const std::uint64_t seed : {1, 2}) {
        x.push_back(on_device(normals(stored, {s.rows, s.in}, seed), stored, 0));
        d_y.push_back(on_device(normals(stored, {s.rows, s.out}, seed + 2), stored, 0));
      }
      const DeviceTensor weight = on_device(normals(stored, {s.out, s.in}, 5), stored, 0);
      const Tensor zero_weight = memory_.zeros(Region::activations, DType::f64, {s.out, s.in});
      const Tensor zero_bias = memory_.zeros(Region::activations, DType::f64, {s.out});
      const DeviceTensor y(stored, {s.rows, s.out}, 0);
      const DeviceTensor d_x(stored, {s.rows, s.in}, 0);
      DeviceTensor d_weight(DType::f32, {s.out, s.in}, 0);
      DeviceTensor d_bias(DType::f32, {s.out}, 0);
      std::vector<std::vector<double>> first[2];
      for (std::size_t repeat = 0; repeat < 100; ++repeat) {
        const std::size_t which = repeat % 2;
        d_weight.upload(zero_weight);
        d_bias.upload(zero_bias);
        run(stream_, LinearForward{y.view(), x[which].view(), weight.view(), {}});
        run(stream_, LinearBackwardInput{d_x.view(), d_y[which].view(), weight.view(), false});
        run(stream_,
            LinearBackwardWeight{
                d_weight.view(), d_bias.view(), d_y[which].view(), x[which].view()});
        std::vector<std::vector<double>> got;
        got.push_back(y.download(stream_));
        got.push_back(d_x.download(stream_));
        got.push_back(d_weight.download(stream_));
        got.push_back(d_bias.download(stream_));
        if (repeat < 2) {
          first[which] = got;
        }
        ASSERT_TRUE(got == first[which]) << "repeat " << repeat;
      }
    }
  }
}

}  // namespace
}  // namespace bifocal
