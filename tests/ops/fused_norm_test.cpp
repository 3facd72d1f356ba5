// Pairs of ops in one call.
#include "ops/fused_norm.h"

#include "ops/elementwise.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"
#include "support/op_test.h"

namespace bifocal::test {

namespace {

class FusedNorm : public OpTest {};

TEST_F(FusedNorm, AddRmsNormGivesTheBitsOfItsOps) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    const Shape shape{13, 40};
    const Tensor a = normal(dtype, shape, 1);
    const Tensor b = normal(dtype, shape, 2);
    const Tensor weight = normal(dtype, {40}, 3);
    const Tensor want_y = empty(dtype, shape);
    const Tensor want_z = empty(dtype, shape);
    run(stream_, Add{want_y, a, b});
    run(stream_, RmsNormForward{want_z, want_y, weight, 1e-5});
    const Tensor z = empty(dtype, shape);
    run(stream_, AddRmsNorm{a, z, a, b, weight, 1e-5});
    EXPECT_SAME_BITS(a, want_y);
    EXPECT_SAME_BITS(z, want_z);
  }
}

TEST_F(FusedNorm, NormRopeGivesTheBitsOfItsOps) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    const Shape shape{7, 3, 12};
    const Tensor x = normal(dtype, shape, 1);
    const Tensor weight = normal(dtype, {12}, 2);
    const Tensor cos = normal(dtype, {7, 6}, 3);
    const Tensor sin = normal(dtype, {7, 6}, 4);
    const Tensor want = empty(dtype, shape);
    run(stream_, RmsNormForward{want.reshape({21, 12}), x.reshape({21, 12}), weight, 1e-5});
    run(stream_, RopeRotate{want, cos, sin});
    run(stream_, NormRope{x, x, weight, cos, sin, 1e-5});
    EXPECT_SAME_BITS(x, want);
  }
}

TEST_F(FusedNorm, RefusesUnequalShapes) {
  const Tensor x = empty(DType::f32, {4, 2, 6});
  const Tensor weight = empty(DType::f32, {6});
  const Tensor angles = empty(DType::f32, {4, 3});
  EXPECT_THROW(run(stream_, NormRope{x, x.reshape({2, 4, 6}), weight, angles, angles}), Error);
  EXPECT_THROW(run(stream_, NormRope{x, x, empty(DType::f32, {5}), angles, angles}), Error);
  EXPECT_THROW(run(stream_, NormRope{x, x, weight, angles, empty(DType::f32, {4, 2})}), Error);
  const Tensor rows = empty(DType::f32, {8, 6});
  EXPECT_THROW(run(stream_, AddRmsNorm{rows, rows, rows, x.reshape({6, 8}), weight}), Error);
}

}  // namespace

}  // namespace bifocal::test
