// Ops of the CPU on bfloat16 tensors: the op in double, rounded once at each store.
#include "ops/widened.h"

#include "ops/linear.h"
#include "ops/swiglu.h"
#include "support/op_test.h"

namespace bifocal {
namespace {

class Widened : public test::OpTest {
 protected:
  Tensor rounded(const ConstTensorView& x, DType dtype) {
    Tensor y = memory_.empty(Region::activations, dtype, x.shape);
    run(cpu_, Cast{.y = y, .x = x});
    return y;
  }

  Tensor narrow_normal(const Shape& shape, std::uint64_t seed) {
    return rounded(normal(DType::f64, shape, seed), DType::bf16);
  }

  // The elements as they are.
  std::vector<double> elements(const ConstTensorView& x) {
    return test::to_doubles(rounded(x, DType::f64));
  }
};

TEST_F(Widened, OutputsAreTheRoundedResultsInDouble) {
  const Tensor x = narrow_normal({5, 33}, 1);
  const Tensor weight = narrow_normal({7, 33}, 2);
  const Tensor y = memory_.empty(Region::activations, DType::bf16, {5, 7});
  const Tensor sums = memory_.empty(Region::activations, DType::f32, {5, 7});
  const Tensor want = empty(DType::f64, {5, 7});
  run(stream_, LinearForward{.y = y, .x = x, .weight = weight});
  run(stream_, LinearForward{.y = sums, .x = x, .weight = weight});
  run(stream_,
      LinearForward{.y = want, .x = rounded(x, DType::f64), .weight = rounded(weight, DType::f64)});
  EXPECT_EQ(elements(y), elements(rounded(want, DType::bf16)));
  EXPECT_EQ(elements(sums), elements(rounded(want, DType::f32)));
}

TEST_F(Widened, WhatIsAddedToKeepsItsValueAndType) {
  const Tensor d_y = narrow_normal({9, 4}, 3);
  const Tensor x = narrow_normal({9, 6}, 4);
  const Tensor d_weight = rounded(normal(DType::f64, {4, 6}, 5), DType::f32);
  const Tensor want = rounded(d_weight, DType::f64);
  run(stream_, LinearBackwardWeight{.d_weight = d_weight, .d_y = d_y, .x = x});
  run(stream_,
      LinearBackwardWeight{
          .d_weight = want, .d_y = rounded(d_y, DType::f64), .x = rounded(x, DType::f64)});
  EXPECT_EQ(elements(d_weight), elements(rounded(want, DType::f32)));
}

TEST_F(Widened, AnOutputMayBeAnInput) {
  const Tensor d_y = narrow_normal({3, 8}, 6);
  const Tensor gate = narrow_normal({3, 8}, 7);
  const Tensor up = narrow_normal({3, 8}, 8);
  const Tensor d_gate = memory_.empty(Region::activations, DType::bf16, {3, 8});
  const Tensor d_up = memory_.empty(Region::activations, DType::bf16, {3, 8});
  run(stream_, SwigluBackward{d_gate, d_up, d_y, gate, up});
  run(stream_, SwigluBackward{d_y, up, d_y, gate, up});
  EXPECT_EQ(elements(d_y), elements(d_gate));
  EXPECT_EQ(elements(up), elements(d_up));
}

}  // namespace
}  // namespace bifocal
