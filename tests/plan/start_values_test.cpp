// Start values of new tensors, whole and in pieces.
#include "plan/start_values.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace bifocal {
namespace {

std::vector<double> values_of(Start start,
                              const Shape& shape,
                              const StartValues& values = {},
                              std::int64_t begin = 0,
                              std::int64_t count = -1) {
  Parameter parameter;
  parameter.name = "x";
  parameter.shape = shape;
  parameter.start = start;
  const std::int64_t size = count < 0 ? shape.size() : count;
  std::vector<double> filled(static_cast<std::size_t>(size), 7.0);
  fill_start_values(parameter, values, begin, {filled.data(), DType::f64, {size}});
  return filled;
}

using Values = std::vector<double>;

TEST(StartValues, AreThoseOfTheSpecification) {
  EXPECT_EQ(values_of(Start::zero, {2, 2}), Values(4, 0.0));
  EXPECT_EQ(values_of(Start::sink, {3}), Values(3, 0.0));
  EXPECT_EQ(values_of(Start::output_bias, {2}), Values(2, -1.0));
  EXPECT_EQ(values_of(Start::identity, {2, 2, 2}), (Values{1, 0, 0, 1, 1, 0, 0, 1}));
  EXPECT_EQ(values_of(Start::forget_bias, {4}), (Values{3, 5, 7, 9}));
  EXPECT_EQ(values_of(Start::forget_bias, {1}), Values{3});
}

TEST(StartValues, FollowTheSettings) {
  const StartValues values{0.5, 2.0, 4.0, -3.0};
  EXPECT_EQ(values_of(Start::sink, {2}, values), Values(2, 0.5));
  EXPECT_EQ(values_of(Start::forget_bias, {3}, values), (Values{2, 3, 4}));
  EXPECT_EQ(values_of(Start::output_bias, {1}, values), Values{-3});
}

TEST(StartValues, PiecesAgreeWithTheWhole) {
  for (const Start start : {Start::identity, Start::forget_bias}) {
    const Shape shape = start == Start::identity ? Shape{3, 5, 5} : Shape{75};
    const Values whole = values_of(start, shape);
    for (const std::int64_t begin : {0, 1, 24, 26, 74}) {
      const Values piece = values_of(start, shape, {}, begin, 75 - begin);
      EXPECT_EQ(piece, Values(whole.begin() + begin, whole.end()));
    }
  }
}

TEST(StartValues, CopiedParametersAreRefused) {
  EXPECT_THROW(values_of(Start::copied, {2}), Error);
}

}  // namespace
}  // namespace bifocal
