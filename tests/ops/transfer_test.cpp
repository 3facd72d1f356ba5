// Copies of bytes, and their refusals.
#include "ops/transfer.h"

#include "support/op_test.h"

namespace bifocal {
namespace {

class Transfer : public test::OpTest {};

TEST_F(Transfer, EveryCopyIsTheSameBytesForAnyType) {
  for (const DType dtype : {DType::f64, DType::f32, DType::i32, DType::u8}) {
    const Tensor x = memory_.empty(Region::activations, dtype, {3, 5});
    test::fill(x, [](std::int64_t i) { return static_cast<double>(i + 1); });
    const Tensor up = zeros(dtype, {3, 5});
    const Tensor down = zeros(dtype, {3, 5});
    const Tensor copy = zeros(dtype, {3, 5});
    run(stream_, Upload{.y = up, .x = x});
    run(stream_, Download{.y = down, .x = x});
    run(stream_, Copy{.y = copy, .x = x});
    synchronize(stream_);
    for (const Tensor* y : {&up, &down, &copy}) {
      EXPECT_EQ(std::memcmp(y->view().data, x.view().data, x.view().bytes()), 0);
    }
  }
}

TEST_F(Transfer, HeadsMoveBetweenTheirPlaces) {
  const Tensor x = memory_.empty(Region::activations, DType::f32, {4, 6, 3});
  test::fill(x, [](std::int64_t i) { return static_cast<double>(i); });
  const Tensor packed = zeros(DType::f32, {4, 2, 3});
  const Tensor back = zeros(DType::f32, {4, 6, 3});
  for (const std::int64_t first : {4, 0, 2}) {
    run(stream_, CopyHeads{.y = packed, .x = x, .x_first = first, .count = 2});
    for (std::int64_t i = 0; i < packed.size(); ++i) {
      const std::int64_t token = i / 6;
      EXPECT_EQ(packed.as<float>()[i], static_cast<float>(token * 18 + first * 3 + i % 6));
    }
    run(stream_, CopyHeads{.y = back, .x = packed, .y_first = first, .count = 2});
  }
  EXPECT_EQ(std::memcmp(back.view().data, x.view().data, x.view().bytes()), 0);
  run(stream_, CopyHeads{.y = back, .x = packed, .count = 0});
}

TEST_F(Transfer, OtherTypesShapesAndHeadsThatAreNotThereAreRefused) {
  const Tensor x = zeros(DType::f32, {4, 6, 3});
  EXPECT_THROW(run(stream_, Copy{.y = zeros(DType::f64, {4, 6, 3}), .x = x}), Error);
  EXPECT_THROW(run(stream_, Upload{.y = zeros(DType::f32, {4, 18}), .x = x}), Error);
  EXPECT_THROW(run(stream_, Download{.y = zeros(DType::f32, {4, 6, 2}), .x = x}), Error);
  const Tensor y = zeros(DType::f32, {4, 2, 3});
  EXPECT_THROW(run(stream_, CopyHeads{.y = y, .x = x, .x_first = 5, .count = 2}), Error);
  EXPECT_THROW(run(stream_, CopyHeads{.y = y, .x = x, .y_first = 1, .count = 2}), Error);
  EXPECT_THROW(run(stream_, CopyHeads{.y = y, .x = x, .x_first = -1, .count = 2}), Error);
  EXPECT_THROW(run(stream_, CopyHeads{.y = zeros(DType::f32, {3, 2, 3}), .x = x, .count = 2}),
               Error);
}

}  // namespace
}  // namespace bifocal
