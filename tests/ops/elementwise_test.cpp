// Add, scale and cast.
#include "ops/elementwise.h"

#include "support/op_test.h"

namespace bifocal::test {

namespace {

class Elementwise : public OpTest {};

TEST_F(Elementwise, AddAndScaleRoundOnce) {
  for (const std::int64_t size : {0, 1, 63, 64, 65, 5000}) {
    const Tensor a = normal(DType::f32, {size}, 1);
    const Tensor b = normal(DType::f32, {size}, 2);
    const Tensor y = empty(DType::f32, {size});
    run(stream_, Add{y, a, b});
    for (std::int64_t i = 0; i < size; ++i) {
      ASSERT_EQ(y.as<float>()[i], a.as<float>()[i] + b.as<float>()[i]);
    }
    run(stream_, Add{a, a, b});
    EXPECT_SAME_BITS(a, y);
  }
}

TEST_F(Elementwise, CastKeepsWhatFits) {
  const std::vector<DType> types = {DType::f64, DType::f32, DType::bf16, DType::f16};
  // Small integers and halves are exact in all four types.
  const Tensor x = empty(DType::f64, {200});
  fill(x, [](std::int64_t i) { return static_cast<double>(i - 100) * 0.5; });
  for (const DType from : types) {
    const Tensor source = memory_.empty(Region::activations, from, {200});
    run(stream_, Cast{source, x});
    for (const DType to : types) {
      const Tensor target = memory_.empty(Region::activations, to, {200});
      run(stream_, Cast{target, source});
      const Tensor back = empty(DType::f64, {200});
      run(stream_, Cast{back, target});
      EXPECT_SAME_BITS(back, x);
    }
  }
}

TEST_F(Elementwise, CastToSixteenBitsRoundsToNearestEvenAlsoFromDouble) {
  // bf16 keeps 7 bits, f16 10. The last value lies just above a tie, by less than a float32 shows:
  // rounding through float32 would go down to even.
  const Tensor x = tensor_of<double>(memory_,
                                     {1.0 + 0x1p-8,
                                      1.0 + 3 * 0x1p-8,
                                      1.0 + 0x1p-8 + 0x1p-40,
                                      -(1.0 + 0x1p-8 + 0x1p-40),
                                      1.0 + 3 * 0x1p-8 - 0x1p-40,
                                      1e300});
  const Tensor bf16 = memory_.empty(Region::activations, DType::bf16, {6});
  const Tensor back = empty(DType::f64, {6});
  run(stream_, Cast{bf16, x});
  run(stream_, Cast{back, bf16});
  const std::vector<double> want = {1.0,
                                    1.0 + 2 * 0x1p-7,
                                    1.0 + 0x1p-7,
                                    -(1.0 + 0x1p-7),
                                    1.0 + 0x1p-7,
                                    std::numeric_limits<double>::infinity()};
  EXPECT_WITHIN(back, want, 0.0);
  const Tensor near_tie = tensor_of<double>(memory_, {1.0 + 0x1p-11 + 0x1p-40, 1.0 + 0x1p-11});
  const Tensor f16 = memory_.empty(Region::activations, DType::f16, {2});
  const Tensor back_f16 = empty(DType::f64, {2});
  run(stream_, Cast{f16, near_tie});
  run(stream_, Cast{back_f16, f16});
  const std::vector<double> want_f16 = {1.0 + 0x1p-10, 1.0};
  EXPECT_WITHIN(back_f16, want_f16, 0.0);
}

TEST_F(Elementwise, CastKeepsNanAndInfinity) {
  const double infinity = std::numeric_limits<double>::infinity();
  const Tensor x = tensor_of<double>(memory_, {infinity, -infinity, std::nan("")});
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    const Tensor y = memory_.empty(Region::activations, type, {3});
    const Tensor back = empty(DType::f64, {3});
    run(stream_, Cast{y, x});
    run(stream_, Cast{back, y});
    EXPECT_WITHIN(back, x, 0.0);
  }
}

TEST_F(Elementwise, ZeroClearsEveryTypeWhateverItHeld) {
  for (const std::int64_t size : {0, 1, 63, 5000}) {
    for (const DType type : {DType::f64, DType::f32, DType::i64, DType::i32, DType::u8}) {
      const Tensor x = memory_.empty(Region::activations, type, {size + 2});
      fill(x, [](std::int64_t) { return 77.0; });
      if (type == DType::f32 || type == DType::f64) {
        fill(x, [](std::int64_t) { return std::numeric_limits<double>::quiet_NaN(); });
      }
      const Tensor before = zeros(type, {1});
      std::memcpy(before.view().data, x.view().data, size_of(type));
      run(stream_, Zero{x.rows(1, size + 1)});
      EXPECT_SAME_BITS(x.rows(1, size + 1), zeros(type, {size}));
      EXPECT_SAME_BITS(x.rows(0, 1), before);
      EXPECT_SAME_BITS(x.rows(size + 1, size + 2), before);
    }
  }
}

TEST_F(Elementwise, RefusesUnequalShapesAndIntegers) {
  const Tensor a = empty(DType::f32, {2, 3});
  const Tensor b = empty(DType::f32, {3, 2});
  const Tensor integers = memory_.empty(Region::activations, DType::i32, {2, 3});
  EXPECT_THROW(run(stream_, Add{a, a, b}), Error);
  EXPECT_THROW(run(stream_, Cast{a, b}), Error);
  EXPECT_THROW(run(stream_, Cast{a, integers}), Error);
}

}  // namespace

}  // namespace bifocal::test
