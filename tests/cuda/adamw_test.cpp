// AdamW on the device against its CPU op in double.
#include "ops/adamw.h"

#include <cmath>

#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "kernels/cuda_stream.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::on_device;
using test::stored_normals;

struct State {
  Tensor parameter, first, second, gradient;
};

State state_of(Memory& memory, DType stored, std::int64_t size) {
  State state{stored_normals(memory, stored, {size}, 13, 0.05),
              stored_normals(memory, stored, {size}, 14, 0.01),
              stored_normals(memory, stored, {size}, 15, 0.01),
              stored_normals(memory, stored, {size}, 16, 0.1)};
  for (std::int64_t i = 0; i < size; ++i) {
    double& second = state.second.as<double>()[i];
    second = test::rounded(stored, second * second);
  }
  if (size > 2) {  // a parameter that never had a gradient
    state.first.as<double>()[2] = state.second.as<double>()[2] = state.gradient.as<double>()[2] = 0;
  }
  return state;
}

AdamW settings(std::int64_t step) {
  AdamW op;
  op.rate = 1e-3;
  op.beta1 = 0.9;
  op.beta2 = 0.999;
  op.decay = 0.1;
  op.grad_scale = 0.7;
  op.step = step;
  return op;
}

// Sizes of the terms whose sums cancel: errors scale with them.
struct Magnitudes {
  std::vector<double> parameter, first;
};

Magnitudes magnitudes(const State& state, const AdamW& op) {
  Magnitudes result;
  const auto step = static_cast<double>(op.step);
  for (std::int64_t i = 0; i < state.parameter.size(); ++i) {
    const double g = op.grad_scale * state.gradient.as<double>()[i];
    const double first =
        std::abs(op.beta1 * state.first.as<double>()[i]) + std::abs((1.0 - op.beta1) * g);
    const double second = op.beta2 * state.second.as<double>()[i] + (1.0 - op.beta2) * g * g;
    const double denominator = std::sqrt(second / (1.0 - std::pow(op.beta2, step))) + op.eps;
    const double update = op.rate * first / (1.0 - std::pow(op.beta1, step)) / denominator;
    result.first.push_back(first);
    result.parameter.push_back(std::abs(state.parameter.as<double>()[i]) + update);
  }
  return result;
}

TEST(CudaAdamW, MatchesTheCpuOp) {
  CudaStream stream;
  CpuStream cpu;
  Memory memory;
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const std::int64_t size : {1, 3, 4, 5, 8, 9, 1023, 1024, 2049, 10007}) {
      for (const std::int64_t step : {1, 1000}) {
        const State state = state_of(memory, stored, size);
        const DeviceTensor parameter = on_device(state.parameter, stored, shift);
        const DeviceTensor first = on_device(state.first, stored, shift);
        const DeviceTensor second = on_device(state.second, stored, shift);
        const DeviceTensor gradient = on_device(state.gradient, stored, shift);
        AdamW op = settings(step);
        const Magnitudes magnitude = magnitudes(state, op);
        op.parameter = state.parameter;
        op.first = state.first;
        op.second = state.second;
        op.gradient = state.gradient;
        run(cpu, op);
        op.parameter = parameter.view();
        op.first = first.view();
        op.second = second.view();
        op.gradient = gradient.view();
        run(stream, op);
        // first: factor, its rounding and the sum on top of the gradient's 2. second: positive
        // terms, the gradient enters twice. parameter: first's 6 and half of second's under the
        // root, then corrections, eps, quotient, rate and sum.
        test::expect_close(first.download(stream), state.first, stored, 6, magnitude.first);
        test::expect_close(second.download(stream), state.second, stored, 9);
        test::expect_close(
            parameter.download(stream), state.parameter, stored, 21, magnitude.parameter);
      }
    }
  }
}

}  // namespace
}  // namespace bifocal
