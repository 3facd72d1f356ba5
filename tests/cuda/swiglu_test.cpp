// SwiGLU on the device against its CPU ops in double.
#include "ops/swiglu.h"

#include <cmath>

#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "kernels/cuda_stream.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::on_device;
using test::stored_normals;

const Shape kShapes[] = {{1, 1}, {1, 7}, {3, 5}, {2, 8}, {5, 129}, {4, 512}, {3, 2731}};

// Gates with both saturated ends, whose sigmoid underflows and whose exp overflows.
Tensor gates(Memory& memory, DType stored, const Shape& shape) {
  Tensor gate = stored_normals(memory, stored, shape, 5, 3.0);
  constexpr double kExtreme[] = {-120.0, -90.0, -30.0, 0.0, 30.0, 120.0};
  for (std::int64_t i = 0; i + 7 <= gate.size(); i += 7) {
    gate.as<double>()[i] = kExtreme[(i / 7) % 6];
  }
  return gate;
}

TEST(CudaSwiglu, ForwardMatchesTheCpuOp) {
  CudaStream stream;
  CpuStream cpu;
  Memory memory;
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const Shape& shape : kShapes) {
      const Tensor gate = gates(memory, stored, shape);
      const Tensor up = stored_normals(memory, stored, shape, 6);
      const Tensor want = memory.empty(Region::activations, DType::f64, shape);
      run(cpu, SwigluForward{want, gate, up});
      const DeviceTensor device_gate = on_device(gate, stored, shift);
      const DeviceTensor device_up = on_device(up, stored, shift);
      const DeviceTensor y(stored, shape, shift);
      run(stream, SwigluForward{y.view(), device_gate.view(), device_up.view()});
      // exponential and quotient are off by at most 2 ulp = 4 roundoffs each; the sum and two
      // products add 3.
      test::expect_close(y.download(stream), want, stored, 12);
    }
  }
}

TEST(CudaSwiglu, BackwardMatchesTheCpuOp) {
  CudaStream stream;
  CpuStream cpu;
  Memory memory;
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const Shape& shape : kShapes) {
      const Tensor gate = gates(memory, stored, shape);
      const Tensor up = stored_normals(memory, stored, shape, 6);
      const Tensor d_y = stored_normals(memory, stored, shape, 7);
      const Tensor want_gate = memory.empty(Region::activations, DType::f64, shape);
      const Tensor want_up = memory.empty(Region::activations, DType::f64, shape);
      run(cpu, SwigluBackward{want_gate, want_up, d_y, gate, up});
      const DeviceTensor device_gate = on_device(gate, stored, shift);
      const DeviceTensor device_up = on_device(up, stored, shift);
      const DeviceTensor device_d_y = on_device(d_y, stored, shift);
      const DeviceTensor d_gate(stored, shape, shift);
      const DeviceTensor d_up(stored, shape, shift);
      const SwigluBackward op{
          d_gate.view(), d_up.view(), device_d_y.view(), device_gate.view(), device_up.view()};
      run(stream, op);
      // d_gate sums 1 and gate (1 - s), which cancel near gate = -1.28: errors scale with the
      // terms. s carries 9 roundoffs, the sum 12, the products 3.
      std::vector<double> magnitude(static_cast<std::size_t>(gate.size()));
      for (std::size_t i = 0; i < magnitude.size(); ++i) {
        const double x = gate.as<double>()[i];
        const double s = 1.0 / (1.0 + std::exp(-x));
        magnitude[i] = std::abs(d_y.as<double>()[i] * up.as<double>()[i]) * s * (1.0 + std::abs(x));
      }
      test::expect_close(d_gate.download(stream), want_gate, stored, 25, magnitude);
      test::expect_close(d_up.download(stream), want_up, stored, 12);
      run(stream,
          SwigluBackward{device_d_y.view(),
                         d_up.view(),
                         device_d_y.view(),
                         device_gate.view(),
                         device_up.view()});
      EXPECT_EQ(device_d_y.download(stream), d_gate.download(stream)) << "d_gate over d_y";
    }
  }
}

}  // namespace
}  // namespace bifocal
