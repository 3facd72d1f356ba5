// RMSNorm on the device against its CPU op in double.
#include "ops/rms_norm.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "kernels/cuda_stream.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::on_device;
using test::stored_normals;

// Rows in the registers of 8, 16 and 32 lanes with one group of 16 bytes and more to each; rows of
// a block, in registers (to 8,192) and wider; widths that are and are not multiples of a vector;
// row counts around those of a block.
const Shape kShapes[] = {{1, 1},    {7, 8},    {8, 127},  {9, 128},  {17, 129}, {131, 64},
                         {65, 128}, {33, 256}, {31, 264}, {5, 520},  {3, 1023}, {3, 1024},
                         {3, 1025}, {3, 2048}, {2, 2560}, {2, 2568}, {3, 4096}, {3, 4104},
                         {2, 8191}, {2, 8192}, {2, 8200}, {2, 20011}};

TEST(CudaRmsNorm, MatchesTheCpuOp) {
  CudaStream stream;
  CpuStream cpu;
  Memory memory;
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const Shape& shape : kShapes) {
      const Tensor x = stored_normals(memory, stored, shape, 8, 4.0);
      const Tensor weight = stored_normals(memory, stored, {shape[1]}, 9);
      const Tensor want = memory.empty(Region::activations, DType::f64, shape);
      run(cpu, RmsNormForward{want, x, weight, 1e-6});
      const DeviceTensor device_x = on_device(x, stored, shift);
      const DeviceTensor device_weight = on_device(weight, stored, shift);
      const DeviceTensor y(stored, shape, shift);
      run(stream, RmsNormForward{y.view(), device_x.view(), device_weight.view(), 1e-6});
      // A thread sums at most max(32, width / 256) squares, then 13 partial sums: so many
      // roundoffs in the mean, half of them in its root, and 5 for root, quotient and products.
      const double terms = std::max<double>(32.0, static_cast<double>(shape[1]) / 256.0) + 13.0;
      test::expect_close(y.download(stream), want, stored, terms / 2.0 + 5.0);
      run(stream, RmsNormForward{device_x.view(), device_x.view(), device_weight.view(), 1e-6});
      EXPECT_EQ(device_x.download(stream), y.download(stream)) << "in place";
    }
  }
}

TEST(CudaRmsNorm, AlternatingInputsGiveTheSameBitsEveryTime) {
  CudaStream stream;
  Memory memory;
  const Shape shape{37, 2560};
  const DeviceTensor weight =
      on_device(stored_normals(memory, DType::f32, {shape[1]}, 9), DType::f32, 0);
  const DeviceTensor x[] = {
      on_device(stored_normals(memory, DType::f32, shape, 10), DType::f32, 0),
      on_device(stored_normals(memory, DType::f32, shape, 11, 100.0), DType::f32, 0)};
  const DeviceTensor y(DType::f32, shape, 0);
  std::vector<double> first[2];
  for (int repeat = 0; repeat < 100; ++repeat) {
    const int which = repeat % 2;
    run(stream, RmsNormForward{y.view(), x[which].view(), weight.view(), 1e-6});
    const std::vector<double> got = y.download(stream);
    if (repeat < 2) {
      first[which] = got;
    }
    ASSERT_EQ(got, first[which]) << "repeat " << repeat;
  }
}

}  // namespace
}  // namespace bifocal
