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

State state_of(Memory& memory, DType moments, std::int64_t size) {
  State state{stored_normals(memory, DType::f32, {size}, 13, 0.05),
              stored_normals(memory, moments, {size}, 14, 0.01),
              stored_normals(memory, moments, {size}, 15, 0.01),
              stored_normals(memory, DType::f32, {size}, 16, 0.1)};
  for (std::int64_t i = 0; i < size; ++i) {
    double& second = state.second.as<double>()[i];
    second = test::rounded(moments, second * second);
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

// Where the tensors begin: a range of a unit's tensors begins at the same element in all of them.
struct Shifts {
  int parameter, first, second, gradient, copy;
};

void expect_update(CudaStream& stream,
                   DType moments,
                   std::int64_t size,
                   std::int64_t step,
                   const Shifts& shifts,
                   bool has_copy) {
  Memory memory;
  CpuStream cpu;
  const State state = state_of(memory, moments, size);
  const DeviceTensor parameter = on_device(state.parameter, DType::f32, shifts.parameter);
  const DeviceTensor first = on_device(state.first, moments, shifts.first);
  const DeviceTensor second = on_device(state.second, moments, shifts.second);
  const DeviceTensor gradient = on_device(state.gradient, DType::f32, shifts.gradient);
  const DeviceTensor copy(DType::bf16, {size}, shifts.copy);
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
  if (has_copy) {
    op.copy = copy.view();
  }
  op.check();
  run(stream, op);
  SCOPED_TRACE(fmt::format("moments {}, size {}, step {}, shifted {} {} {}",
                           name_of(moments),
                           size,
                           step,
                           shifts.parameter,
                           shifts.first,
                           shifts.copy));
  // first: factor, its rounding and the sum on top of the gradient's 2. second: positive terms, the
  // gradient enters twice. parameter: first's 6 and half of second's under the root, then
  // corrections, eps, quotient, rate and sum.
  test::expect_close(first.download(stream), state.first, moments, 6, magnitude.first);
  test::expect_close(second.download(stream), state.second, moments, 9);
  const std::vector<double> updated = parameter.download(stream);
  test::expect_close(updated, state.parameter, DType::f32, 21, magnitude.parameter);
  const std::vector<double> copied = copy.download(stream);
  for (std::size_t i = 0; has_copy && i < copied.size(); ++i) {
    ASSERT_EQ(copied[i], test::rounded(DType::bf16, updated[i])) << "element " << i;
  }
}

TEST(CudaAdamW, MatchesTheCpuOp) {
  CudaStream stream;
  for (const DType moments : {DType::f32, DType::bf16}) {
    for (const std::int64_t size : {1, 3, 4, 5, 8, 9, 1023, 1024, 2049, 10007}) {
      for (const std::int64_t step : {1, 1000}) {
        expect_update(stream, moments, size, step, {0, 0, 0, 0, 0}, size % 2 == 1);
      }
    }
  }
}

TEST(CudaAdamW, RangesMayBeginAnywhere) {
  CudaStream stream;
  for (const DType moments : {DType::f32, DType::bf16}) {
    for (const std::int64_t size : {1, 2, 3, 4, 5, 6, 7, 1027}) {
      for (int shift = 1; shift < 9; ++shift) {
        expect_update(stream, moments, size, 3, {shift, shift, shift, shift, shift}, true);
      }
      expect_update(stream, moments, size, 3, {1, 2, 3, 4, 5}, true);
      expect_update(stream, moments, size, 3, {4, 0, 8, 4, 1}, true);
    }
  }
}

TEST(CudaAdamW, OtherTypesAreRefused) {
  CudaStream stream;
  const TensorView half{nullptr, DType::bf16, {4}};
  const TensorView single{nullptr, DType::f32, {4}};
  AdamW op = settings(1);
  op.parameter = half;
  op.first = op.second = single;
  op.gradient = half;
  EXPECT_THROW(run(stream, op), Error);
}

}  // namespace
}  // namespace bifocal
