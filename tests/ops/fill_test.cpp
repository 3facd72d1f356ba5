// Values and random numbers everywhere.
#include "ops/fill.h"

#include "core/random.h"
#include "support/op_test.h"

namespace bifocal::test {

namespace {

class FillTest : public OpTest {};

double element(const Tensor& x, std::int64_t i) {
  switch (x.dtype()) {
    case DType::bf16:
      return to_float(x.as<BFloat16>()[i]);
    case DType::f32:
      return x.as<float>()[i];
    default:
      return x.as<double>()[i];
  }
}

TEST_F(FillTest, WritesTheRoundedValueEverywhere) {
  const double value = 1.0 + 3.0 / 512.0;  // between two bfloat16, nearer to the upper one
  for (const auto& [dtype, want] :
       {std::pair{DType::f64, value}, {DType::f32, value}, {DType::bf16, 1.0 + 4.0 / 512.0}}) {
    for (const std::int64_t size : {0, 1, 63, 64, 65, 30000}) {
      const Tensor x = empty(dtype, {size});
      run(stream_, Fill{x, value});
      for (std::int64_t i = 0; i < size; ++i) {
        ASSERT_EQ(element(x, i), want) << name_of(dtype) << " element " << i << " of " << size;
      }
    }
  }
}

TEST_F(FillTest, NormalsAreThoseOfTheirNumbersInAnyCut) {
  constexpr std::int64_t kSize = 1000;
  constexpr std::uint64_t kBegin = 1ULL << 33U;
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const Tensor whole = empty(dtype, {kSize});
    const Tensor cut = empty(dtype, {kSize});
    run(stream_, FillNormal{whole, 7, 9, kBegin, 0.02});
    for (const auto& [begin, end] : {std::pair{0, 13}, {13, 14}, {14, 1000}}) {
      run(stream_,
          FillNormal{cut.rows(begin, end), 7, 9, kBegin + static_cast<std::uint64_t>(begin), 0.02});
    }
    for (std::int64_t i = 0; i < kSize; ++i) {
      const double exact = 0.02 * random_normal(7, 9, kBegin + static_cast<std::uint64_t>(i));
      const auto single = static_cast<float>(exact);
      const double want = dtype == DType::f64   ? exact
                          : dtype == DType::f32 ? single
                                                : to_float(to_bfloat16(single));
      ASSERT_EQ(element(whole, i), want) << name_of(dtype) << " element " << i;
      ASSERT_EQ(element(cut, i), want) << name_of(dtype) << " element " << i;
    }
  }
}

TEST_F(FillTest, OtherTypesAreRefused) {
  const Tensor x = empty(DType::i32, {3});
  EXPECT_THROW(run(stream_, Fill{x, 1.0}), Error);
  EXPECT_THROW(run(stream_, FillNormal{x, 1, 2, 0, 1.0}), Error);
}

}  // namespace

}  // namespace bifocal::test
