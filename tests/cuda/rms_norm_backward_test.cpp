// The gradient of RMSNorm on the device against its CPU op in double.
#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "kernels/cuda_stream.h"
#include "ops/elementwise.h"
#include "ops/rms_norm.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::on_device;
using test::stored_normals;

// Rows of 8, 16 and 32 lanes and of a block, with one group and two to a thread; widths below those
// and beyond; more rows than teams; a row more or less than the teams of a warp or a block.
const Shape kShapes[] = {{1, 1},    {5, 7},       {33, 8},     {31, 64},    {17, 128},
                         {3, 136},  {20011, 64},  {9001, 128}, {4501, 256}, {7, 1000},
                         {2, 1024}, {1201, 2560}, {3, 4096},   {5, 4104},   {401, 5120},
                         {3, 8192}, {2, 8200},    {300, 129},  {3, 20011},  {0, 64}};

struct Problem {
  Tensor x, weight, d_y, d_x, d_weight;

  Problem(Memory& memory, DType stored, const Shape& shape)
      : x(stored_normals(memory, stored, shape, 1, 4.0)),
        weight(stored_normals(memory, stored, {shape[1]}, 2)),
        d_y(stored_normals(memory, stored, shape, 3)),
        d_x(stored_normals(memory, stored, shape, 4)),
        d_weight(stored_normals(memory, DType::f32, {shape[1]}, 5)) {}
};

// Sizes of the terms whose sums cancel.
struct Magnitudes {
  std::vector<double> d_x, d_weight;

  Magnitudes(const Problem& p, bool accumulate) {
    const std::int64_t width = p.weight.size();
    for (std::int64_t i = 0; i < width; ++i) {
      d_weight.push_back(std::abs(p.d_weight.as<double>()[i]));
    }
    for (std::int64_t row = 0; row < p.x.shape()[0]; ++row) {
      const double* x = p.x.as<double>() + row * width;
      const double* d_y = p.d_y.as<double>() + row * width;
      double squares = 0.0;
      double along = 0.0;
      for (std::int64_t i = 0; i < width; ++i) {
        squares += x[i] * x[i];
        along += std::abs(x[i] * p.weight.as<double>()[i] * d_y[i]);
      }
      const auto count = static_cast<double>(width);
      const double r = 1.0 / std::sqrt(squares / count + 1e-6);
      for (std::int64_t i = 0; i < width; ++i) {
        const double before = accumulate ? std::abs(p.d_x.as<double>()[row * width + i]) : 0.0;
        d_x.push_back(before + std::abs(r * p.weight.as<double>()[i] * d_y[i]) +
                      std::abs(along * r * r * r / count * x[i]));
        d_weight[static_cast<std::size_t>(i)] += std::abs(d_y[i] * x[i] * r);
      }
    }
  }
};

void expect_gradients(
    CudaStream& stream, DType stored, int shift, const Shape& shape, bool accumulate) {
  Memory memory;
  CpuStream cpu;
  const Problem p(memory, stored, shape);
  const Magnitudes magnitude(p, accumulate);
  const DeviceTensor x = on_device(p.x, stored, shift);
  const DeviceTensor weight = on_device(p.weight, stored, shift);
  const DeviceTensor d_y = on_device(p.d_y, stored, shift);
  const DeviceTensor d_x = on_device(p.d_x, stored, shift);
  const DeviceTensor d_weight = on_device(p.d_weight, DType::f32, shift);
  run(cpu, RmsNormBackward{p.d_x, p.d_weight, p.d_y, p.x, p.weight, 1e-6, accumulate});
  RmsNormBackward op{
      d_x.view(), d_weight.view(), d_y.view(), x.view(), weight.view(), 1e-6, accumulate};
  op.check();
  run(stream, op);
  SCOPED_TRACE(fmt::format("{} shifted {}, {}{}",
                           name_of(stored),
                           shift,
                           to_string(shape),
                           accumulate ? ", added" : ""));
  // A sum of a row has at most max(16, width / 512) terms in a thread and 21 parts; r has half of
  // the squares' error and 4 more, and enters thrice.
  const double terms = std::max(16.0, static_cast<double>(shape[1]) / 512.0) + 21.0;
  const double of_r = terms / 2.0 + 4.0;
  const std::vector<double> got = d_x.download(stream);
  test::expect_close(got, p.d_x, stored, terms + 3.0 * of_r + 6.0, magnitude.d_x);
  // A team adds up at most 4 rows here (40 where any width goes), up to 32 sums follow.
  test::expect_close(
      d_weight.download(stream), p.d_weight, DType::f32, of_r + 60.0, magnitude.d_weight);
  if (!accumulate) {
    op.d_x = d_y.view();
    op.d_weight = {};
    op.check();
    run(stream, op);
    EXPECT_EQ(d_y.download(stream), got) << "in place, without d_weight";
  }
}

TEST(CudaRmsNormBackward, MatchesTheCpuOp) {
  CudaStream stream;
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const Shape& shape : kShapes) {
      expect_gradients(stream, stored, shift, shape, false);
    }
  }
}

TEST(CudaRmsNormBackward, AddsToTheInputsGradientWhereTold) {
  CudaStream stream;
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const Shape& shape : {Shape{5, 7}, Shape{31, 64}, Shape{17, 128}, Shape{37, 2560}}) {
      expect_gradients(stream, stored, shift, shape, true);
    }
  }
}

TEST(CudaRmsNormBackward, AlternatingInputsGiveTheSameBitsEveryTime) {
  CudaStream stream;
  Memory memory;
  for (const Shape& shape : {Shape{1000, 2560}, Shape{20000, 128}}) {
    const Problem p(memory, DType::bf16, shape);
    const DeviceTensor x[] = {on_device(p.x, DType::bf16, 0), on_device(p.d_x, DType::bf16, 0)};
    const DeviceTensor weight = on_device(p.weight, DType::bf16, 0);
    const DeviceTensor d_y = on_device(p.d_y, DType::bf16, 0);
    const DeviceTensor d_x(DType::bf16, shape, 0);
    const DeviceTensor d_weight(DType::f32, {shape[1]}, 0);
    std::vector<double> first[2][2];
    for (int repeat = 0; repeat < 30; ++repeat) {
      const int which = repeat % 2;
      run(stream, Zero{d_weight.view()});
      run(stream,
          RmsNormBackward{d_x.view(), d_weight.view(), d_y.view(), x[which].view(), weight.view()});
      const std::vector<double> got[] = {d_x.download(stream), d_weight.download(stream)};
      for (int i = 0; i < 2; ++i) {
        if (repeat < 2) {
          first[which][i] = got[i];
        }
        ASSERT_EQ(got[i], first[which][i]) << to_string(shape) << " repeat " << repeat;
      }
    }
  }
}

}  // namespace
}  // namespace bifocal
