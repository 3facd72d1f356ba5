// The mix of far and near sight on the device against its CPU op in double.
#include "ops/bifocal_gate.h"

#include <cmath>

#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "kernels/cuda_stream.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::on_device;
using test::stored_normals;

const Shape kShapes[] = {{1, 1, 1}, {3, 5, 6}, {7, 4, 64}, {9, 3, 100}, {5, 32, 128}, {2, 3, 256}};

struct Problem {
  Tensor far, near, gate, d_y;

  // Gates from wide open to shut.
  Problem(Memory& memory, DType stored, const Shape& shape)
      : far(stored_normals(memory, stored, shape, 41)),
        near(stored_normals(memory, stored, shape, 42)),
        gate(stored_normals(memory, stored, {shape[0], shape[1]}, 43, 8.0)),
        d_y(stored_normals(memory, stored, shape, 44)) {}
};

// |far o| + |near (1 - o)|, and for each row sum |d_y| (|far| + |near|) o (1 - o).
struct Magnitudes {
  std::vector<double> mix, d_gate;
};

Magnitudes magnitudes(const Problem& p) {
  Magnitudes result;
  const std::int64_t dim = p.far.shape()[2];
  for (std::int64_t row = 0; row < p.gate.size(); ++row) {
    const double o = 1.0 / (1.0 + std::exp(-p.gate.as<double>()[row]));
    const double shut = 1.0 / (1.0 + std::exp(p.gate.as<double>()[row]));
    double sum = 0;
    for (std::int64_t i = row * dim; i < (row + 1) * dim; ++i) {
      const double far = std::abs(p.far.as<double>()[i]);
      const double near = std::abs(p.near.as<double>()[i]);
      result.mix.push_back(o * far + shut * near);
      sum += std::abs(p.d_y.as<double>()[i]) * (far + near);
    }
    result.d_gate.push_back(o * shut * sum);
  }
  return result;
}

TEST(CudaBifocalGate, MixAndGradientsMatchTheCpuOp) {
  CudaStream stream;
  CpuStream cpu;
  Memory memory;
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const Shape& shape : kShapes) {
      const Problem p(memory, stored, shape);
      const Magnitudes size = magnitudes(p);
      const DeviceTensor far = on_device(p.far, stored, shift);
      const DeviceTensor near = on_device(p.near, stored, shift);
      const DeviceTensor gate = on_device(p.gate, stored, shift);
      const DeviceTensor d_y = on_device(p.d_y, stored, shift);

      const Tensor want_y = memory.empty(Region::activations, DType::f64, shape);
      run(cpu, BifocalGateForward{want_y, p.far, p.near, p.gate});
      const DeviceTensor y(stored, shape, shift);
      const BifocalGateForward mix{y.view(), far.view(), near.view(), gate.view()};
      mix.check();
      run(stream, mix);
      // The sigmoid: exponential of two roundoffs, sum and quotient; two products and their sum.
      test::expect_close(y.download(stream), want_y, stored, 10, size.mix);

      const Tensor want_far = memory.empty(Region::activations, DType::f64, shape);
      const Tensor want_near = memory.empty(Region::activations, DType::f64, shape);
      const Tensor want_gate = memory.empty(Region::activations, DType::f64, p.gate.shape());
      run(cpu, BifocalGateBackward{want_far, want_near, want_gate, p.d_y, p.far, p.near, p.gate});
      const DeviceTensor d_far(stored, shape, shift);
      const DeviceTensor d_near(stored, shape, shift);
      const DeviceTensor d_gate(stored, p.gate.shape(), shift);
      const BifocalGateBackward back{d_far.view(),
                                     d_near.view(),
                                     d_gate.view(),
                                     d_y.view(),
                                     far.view(),
                                     near.view(),
                                     gate.view()};
      back.check();
      run(stream, back);
      test::expect_close(d_far.download(stream), want_far, stored, 10);
      test::expect_close(d_near.download(stream), want_near, stored, 10);
      // A thread sums up to 8 products, then 5 sums across the warp.
      test::expect_close(d_gate.download(stream), want_gate, stored, 30, size.d_gate);
    }
  }
}

}  // namespace
}  // namespace bifocal
