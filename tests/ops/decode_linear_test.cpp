// Products of a few rows: against plain sums in double, and the same bits in any company.
#include "ops/decode_linear.h"

#include "ops/elementwise.h"
#include "support/op_test.h"

namespace bifocal::test {

namespace {

struct Size {
  std::int64_t rows, in, out;
};

// Around the tiles (4 outputs, 3 rows) and the lanes (8 and 4), one, none.
const std::vector<Size> kSizes = {{1, 1, 1},
                                  {1, 8, 4},
                                  {1, 64, 300},
                                  {2, 7, 3},
                                  {3, 24, 5},
                                  {4, 31, 17},
                                  {5, 65, 40},
                                  {7, 9, 6},
                                  {32, 48, 97},
                                  {0, 8, 8},
                                  {3, 0, 5}};

class DecodeProducts : public OpTest {
 protected:
  Tensor bfloat16(const Tensor& x) {
    Tensor y = memory_.empty(Region::weights, DType::bf16, x.shape());
    run(stream_, Cast{.y = y, .x = x});
    return y;
  }

  // The types of x and y and of the weight.
  struct Types {
    DType compute, stored;
  };

  static constexpr std::array<Types, 3> kTypes = {
      {{DType::f64, DType::f64}, {DType::f32, DType::f32}, {DType::f32, DType::bf16}}};

  Tensor weight_of(Types types, const Shape& shape, std::uint64_t seed) {
    Tensor weight = normal(types.compute, shape, seed);
    return types.stored == DType::bf16 ? bfloat16(weight) : std::move(weight);
  }

  // The weight as stored, in double.
  std::vector<double> values_of(const Tensor& weight) {
    const Tensor wide = memory_.empty(Region::weights, DType::f64, weight.shape());
    run(stream_, Cast{.y = wide, .x = weight});
    return to_doubles(wide);
  }
};

// Sums of up to 65 products of unit size: rounding stays below 1e-6 of the largest in float32.
TEST_F(DecodeProducts, LinearMatchesPlainSums) {
  for (const Types types : kTypes) {
    for (const Size s : kSizes) {
      for (const bool with_bias : {false, true}) {
        const Tensor x = normal(types.compute, {s.rows, s.in}, 1);
        const Tensor weight = weight_of(types, {s.out, s.in}, 2);
        const Tensor bias = normal(types.compute, {s.out}, 3);
        const Tensor y = empty(types.compute, {s.rows, s.out});
        DecodeLinear op{.y = y, .x = x, .weight = weight};
        if (with_bias) {
          op.bias = bias;
        }
        run(stream_, op);
        const auto a = to_doubles(x);
        const auto w = values_of(weight);
        const auto b = to_doubles(bias);
        std::vector<double> want;
        for (std::size_t row = 0; row < static_cast<std::size_t>(s.rows); ++row) {
          for (std::size_t o = 0; o < b.size(); ++o) {
            double sum = with_bias ? b[o] : 0.0;
            for (std::size_t i = 0; i < static_cast<std::size_t>(s.in); ++i) {
              sum += a[row * static_cast<std::size_t>(s.in) + i] *
                     w[o * static_cast<std::size_t>(s.in) + i];
            }
            want.push_back(sum);
          }
        }
        EXPECT_CLOSE(y, want, types.compute == DType::f64 ? 1e-14 : 1e-6)
            << s.rows << " x " << s.in << " x " << s.out;
      }
    }
  }
}

TEST_F(DecodeProducts, ARowOfLinearHasTheSameBitsInAnyBatch) {
  for (const Types types : kTypes) {
    for (const std::int64_t in : {5, 64, 83}) {
      constexpr std::int64_t kOut = 37;
      const Tensor x = normal(types.compute, {11, in}, 1);
      const Tensor weight = weight_of(types, {kOut, in}, 2);
      const Tensor all = empty(types.compute, {11, kOut});
      run(stream_, DecodeLinear{.y = all, .x = x, .weight = weight});
      for (std::int64_t first = 0; first < 11; ++first) {
        for (const std::int64_t count : {1, 2, 4}) {
          const std::int64_t last = std::min<std::int64_t>(11, first + count);
          const Tensor part = empty(types.compute, {last - first, kOut});
          run(stream_, DecodeLinear{.y = part, .x = x.rows(first, last), .weight = weight});
          EXPECT_SAME_BITS(part, all.rows(first, last));
        }
      }
    }
  }
}

TEST_F(DecodeProducts, ThreadsDoNotChangeABit) {
  const Tensor x = normal(DType::f32, {5, 300}, 1);
  const Tensor weight = normal(DType::f32, {401, 300}, 2);
  const Tensor one = empty(DType::f32, {5, 401});
  const Tensor three = empty(DType::f32, {5, 401});
  with_threads(1, [&] { run(stream_, DecodeLinear{.y = one, .x = x, .weight = weight}); });
  with_threads(3, [&] { run(stream_, DecodeLinear{.y = three, .x = x, .weight = weight}); });
  EXPECT_SAME_BITS(three, one);
}

// Softmax of logits of a few units: their rounding, 1e-6, is that of the features.
TEST_F(DecodeProducts, FeaturesAreSoftmaxesOfEveryHead) {
  for (const Types types : kTypes) {
    for (const std::int64_t x_heads : {1, 2, 4}) {
      constexpr std::int64_t kHeads = 4;
      constexpr std::int64_t kDim = 13;
      const Tensor x = normal(types.compute, {5, x_heads, kDim}, 1, 0.5);
      const Tensor weight = weight_of(types, {kHeads, kDim, kDim}, 2);
      const Tensor y = empty(types.compute, {5, kHeads, kDim});
      run(stream_, DecodeFeatureMap{.y = y, .x = x, .weight = weight});
      const auto a = to_doubles(x);
      const auto w = values_of(weight);
      std::vector<double> want;
      for (std::int64_t row = 0; row < 5; ++row) {
        for (std::int64_t head = 0; head < kHeads; ++head) {
          std::vector<double> e;
          double total = 0.0;
          const std::int64_t x_row = row * x_heads + head / (kHeads / x_heads);
          for (std::int64_t f = 0; f < kDim; ++f) {
            double z = 0.0;
            for (std::int64_t i = 0; i < kDim; ++i) {
              z += w[static_cast<std::size_t>((head * kDim + f) * kDim + i)] *
                   a[static_cast<std::size_t>(x_row * kDim + i)];
            }
            e.push_back(std::exp(z));
            total += e.back();
          }
          for (const double value : e) {
            want.push_back(value / total);
          }
        }
      }
      EXPECT_CLOSE(y, want, types.compute == DType::f64 ? 1e-14 : 3e-6);
      const Tensor one = empty(types.compute, {1, kHeads, kDim});
      run(stream_, DecodeFeatureMap{.y = one, .x = x.rows(3, 4), .weight = weight});
      EXPECT_SAME_BITS(one, y.rows(3, 4));
    }
  }
}

TEST_F(DecodeProducts, RefuseOtherShapesAndTypes) {
  const Tensor x = normal(DType::f32, {2, 6}, 1);
  const Tensor y = empty(DType::f32, {2, 4});
  const Tensor weight = normal(DType::f32, {4, 6}, 2);
  EXPECT_THROW(run(stream_, DecodeLinear{y, x, normal(DType::f32, {4, 5}, 2), {}}), Error);
  EXPECT_THROW(run(stream_, DecodeLinear{y, x, normal(DType::f64, {4, 6}, 2), {}}), Error);
  EXPECT_THROW(run(stream_, DecodeLinear{y, x, weight, normal(DType::f32, {5}, 2)}), Error);
  const Tensor doubles = normal(DType::f64, {2, 6}, 1);
  const Tensor out = empty(DType::f64, {2, 4});
  EXPECT_THROW(run(stream_, DecodeLinear{out, doubles, bfloat16(weight), {}}), Error);
  const Tensor heads = normal(DType::f32, {2, 3, 4}, 1);
  EXPECT_THROW(
      run(stream_,
          DecodeFeatureMap{empty(DType::f32, {2, 4, 4}), heads, normal(DType::f32, {4, 4, 4}, 2)}),
      Error);
}

}  // namespace

}  // namespace bifocal::test
