// The far/near gate: values, finite differences, saturated gates.
#include "ops/bifocal_gate.h"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "core/memory.h"
#include "support/compare.h"
#include "support/fill.h"
#include "support/gradient_check.h"

namespace bifocal {

namespace {

using test::normal_tensor;

struct Problem {
  Tensor far, near, gate, d_y, y, d_far, d_near, d_gate;

  Problem(Memory& memory, DType type, const Shape& shape) {
    const Shape rows{shape[0], shape[1]};
    far = normal_tensor(memory, type, shape, 1);
    near = normal_tensor(memory, type, shape, 2);
    gate = normal_tensor(memory, type, rows, 3, 2.0);
    d_y = normal_tensor(memory, type, shape, 4);
    y = memory.empty(Region::activations, type, shape);
    d_far = memory.empty(Region::activations, type, shape);
    d_near = memory.empty(Region::activations, type, shape);
    d_gate = memory.empty(Region::activations, type, rows);
  }

  BifocalGateForward forward() const { return {y, far, near, gate}; }

  BifocalGateBackward backward() const { return {d_far, d_near, d_gate, d_y, far, near, gate}; }

  void run_both() const {
    CpuStream cpu;
    Stream stream{&cpu};
    run(stream, forward());
    run(stream, backward());
  }
};

struct Expected {
  std::vector<double> y, d_far, d_near, d_gate;
};

Expected define(const Problem& p) {
  const std::vector<double> far = test::to_doubles(p.far);
  const std::vector<double> near = test::to_doubles(p.near);
  const std::vector<double> gate = test::to_doubles(p.gate);
  const std::vector<double> d_y = test::to_doubles(p.d_y);
  const std::size_t dim = far.size() / gate.size();
  Expected want;
  for (std::size_t row = 0; row < gate.size(); ++row) {
    const double o = 1.0 / (1.0 + std::exp(-gate[row]));
    double sum = 0.0;
    for (std::size_t i = row * dim; i < (row + 1) * dim; ++i) {
      want.y.push_back(o * far[i] + (1.0 - o) * near[i]);
      want.d_far.push_back(o * d_y[i]);
      want.d_near.push_back((1.0 - o) * d_y[i]);
      sum += d_y[i] * (far[i] - near[i]);
    }
    want.d_gate.push_back(o * (1.0 - o) * sum);
  }
  return want;
}

TEST(BifocalGate, MatchesItsFormulaInBothTypes) {
  for (const Shape& shape : {Shape{1, 1, 1}, Shape{3, 5, 7}, Shape{129, 8, 32}, Shape{40, 3, 64}}) {
    for (const DType type : {DType::f32, DType::f64}) {
      Memory memory;
      const Problem p(memory, type, shape);
      p.run_both();
      const Expected want = define(p);
      // A handful of roundings; the gate's gradient sums head_dim terms.
      const double bound = type == DType::f64 ? 1e-14 : 2e-6;
      EXPECT_CLOSE(p.y, want.y, bound);
      EXPECT_CLOSE(p.d_far, want.d_far, bound);
      EXPECT_CLOSE(p.d_near, want.d_near, bound);
      EXPECT_CLOSE(p.d_gate, want.d_gate, bound);
    }
  }
}

TEST(BifocalGate, GradientsMatchFiniteDifferences) {
  Memory memory;
  const Problem p(memory, DType::f64, {4, 3, 5});
  p.run_both();
  CpuStream cpu;
  const auto loss = [&] {
    run(cpu, p.forward());
    return test::weighted_sum(p.y, p.d_y);
  };
  EXPECT_GRADIENT(p.far, p.d_far, loss);
  EXPECT_GRADIENT(p.near, p.d_near, loss);
  EXPECT_GRADIENT(p.gate, p.d_gate, loss);
}

TEST(BifocalGate, SaturatedGatesPassOneBranchExactly) {
  for (const DType type : {DType::f32, DType::f64}) {
    Memory memory;
    const Problem p(memory, type, {2, 1, 16});
    test::fill(p.gate, [](std::int64_t i) { return i == 0 ? 800.0 : -800.0; });
    p.run_both();
    EXPECT_SAME_BITS(p.y.rows(0, 1), p.far.rows(0, 1));
    EXPECT_SAME_BITS(p.y.rows(1, 2), p.near.rows(1, 2));
    EXPECT_SAME_BITS(p.d_far.rows(0, 1), p.d_y.rows(0, 1));
    EXPECT_SAME_BITS(p.d_near.rows(1, 2), p.d_y.rows(1, 2));
    EXPECT_EQ(test::max_abs_error(p.d_gate, std::vector<double>(2, 0.0)), 0.0);
  }
}

TEST(BifocalGate, EmptyRowsAreAllowed) {
  Memory memory;
  const Problem p(memory, DType::f32, {0, 4, 8});
  EXPECT_NO_THROW(p.run_both());
}

TEST(BifocalGate, RefusesWrongShapesAndTypes) {
  Memory memory;
  const Problem p(memory, DType::f32, {4, 2, 8});
  const Problem wide(memory, DType::f64, {4, 2, 8});
  CpuStream cpu;
  Stream stream{&cpu};
  BifocalGateForward forward = p.forward();
  forward.near = wide.near;
  EXPECT_THROW(run(stream, forward), Error);
  forward = p.forward();
  forward.gate = p.gate.rows(0, 3);
  EXPECT_THROW(run(stream, forward), Error);
  BifocalGateBackward backward = p.backward();
  backward.d_gate = p.d_far;
  EXPECT_THROW(run(stream, backward), Error);
}

}  // namespace

}  // namespace bifocal
