// Rotation by position on the device against its CPU op in double.
#include "ops/rope.h"

#include <cmath>

#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "kernels/cuda_stream.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::on_device;
using test::stored_normals;

// Head widths whose halves are and are not multiples of a vector; more pairs than threads.
const Shape kShapes[] = {{1, 1, 2}, {3, 2, 6}, {5, 3, 32}, {7, 4, 64}, {4, 32, 128}, {2, 5, 256}};

struct Angles {
  Tensor cos, sin;
};

// Angles of far positions, as float32 stores their cos and sin.
Angles angles(Memory& memory, std::int64_t tokens, std::int64_t half) {
  Angles result{memory.empty(Region::activations, DType::f64, {tokens, half}),
                memory.empty(Region::activations, DType::f64, {tokens, half})};
  for (std::int64_t i = 0; i < tokens * half; ++i) {
    const double angle = 40959.0 * static_cast<double>(i + 1) / 7.0;
    result.cos.as<double>()[i] = test::rounded(DType::f32, std::cos(angle));
    result.sin.as<double>()[i] = test::rounded(DType::f32, std::sin(angle));
  }
  return result;
}

// |x cos| + |partner sin| for each element of x [tokens, heads, 2 half].
std::vector<double> magnitudes(const Tensor& x, const Angles& a) {
  const std::int64_t width = x.shape()[2];
  const std::int64_t half = width / 2;
  std::vector<double> result(static_cast<std::size_t>(x.size()));
  for (std::int64_t i = 0; i < x.size(); ++i) {
    const std::int64_t column = i % width;
    const std::int64_t partner = column < half ? i + half : i - half;
    const std::int64_t angle = i / (width * x.shape()[1]) * half + column % half;
    result[static_cast<std::size_t>(i)] =
        std::abs(x.as<double>()[i] * a.cos.as<double>()[angle]) +
        std::abs(x.as<double>()[partner] * a.sin.as<double>()[angle]);
  }
  return result;
}

TEST(CudaRope, RotationMatchesTheCpuOpBothWays) {
  CudaStream stream;
  CpuStream cpu;
  Memory memory;
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const Shape& shape : kShapes) {
      for (const bool inverse : {false, true}) {
        const Tensor x = stored_normals(memory, stored, shape, 12);
        const Angles table = angles(memory, shape[0], shape[2] / 2);
        const std::vector<double> magnitude = magnitudes(x, table);
        const DeviceTensor device_x = on_device(x, stored, shift);
        const DeviceTensor cos = on_device(table.cos, DType::f32, shift);
        const DeviceTensor sin = on_device(table.sin, DType::f32, shift);
        run(cpu, RopeRotate{x, table.cos, table.sin, inverse});
        run(stream, RopeRotate{device_x.view(), cos.view(), sin.view(), inverse});
        // Two products and their sum.
        test::expect_close(device_x.download(stream), x, stored, 3, magnitude);
      }
    }
  }
}

// Angles are the CPU's; cos and sin are off by the rounding to float32 and, near its midpoints and
// the functions' zeros, by a few roundoffs of double.
TEST(CudaRope, TableMatchesTheCpuOp) {
  CudaStream stream;
  CpuStream cpu;
  Memory memory;
  const std::vector<std::int32_t> positions{0, 1, 2, 3, 447, 40959, 131071, 1048575, 2147483647};
  const auto tokens = static_cast<std::int64_t>(positions.size());
  const DeviceTensor device_positions = test::numbers_on_device(positions);
  for (const int half : {1, 32, 64, 128, 129, 300}) {
    const std::vector<double> frequencies = rope_frequencies(2 * half, 1e6, {});
    const Tensor want_cos = memory.empty(Region::activations, DType::f64, {tokens, half});
    const Tensor want_sin = memory.empty(Region::activations, DType::f64, {tokens, half});
    const DeviceTensor cos(DType::f32, {tokens, half}, 0);
    const DeviceTensor sin(DType::f32, {tokens, half}, 3);
    RopeTable op{want_cos,
                 want_sin,
                 {positions.data(), DType::i32, {tokens}},
                 {frequencies.data(), DType::f64, {half}}};
    run(cpu, op);
    op.cos = cos.view();
    op.sin = sin.view();
    op.positions = device_positions.view();
    const DeviceTensor device_frequencies = test::numbers_on_device(frequencies);
    op.frequencies = device_frequencies.view();
    op.check();
    run(stream, op);
    for (const auto& [got, want] : {std::pair{&cos, &want_cos}, {&sin, &want_sin}}) {
      const std::vector<double> values = got->download(stream);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double exact = want->as<double>()[i];
        ASSERT_LE(std::abs(values[i] - exact), std::abs(exact) * test::kRoundoff + 3e-15)
            << (got == &cos ? "cos" : "sin") << " of width " << half << ", element " << i
            << ": got " << values[i] << ", want " << exact;
      }
    }
  }
}

}  // namespace
}  // namespace bifocal
