// Drawing tokens.
#include "ops/sample.h"

#include <numeric>

#include "support/op_test.h"

namespace bifocal::test {

namespace {

class Sampling : public OpTest {
 protected:
  // One row of logits, drawn `draws` times at successive indices.
  std::vector<std::int64_t> counts(const std::vector<double>& logits, Sample op, int draws) {
    const auto vocabulary = static_cast<std::int64_t>(logits.size());
    const Tensor row = tensor_of(memory_, logits);
    const Tensor ids = memory_.empty(Region::cache, DType::i32, {1});
    const Tensor streams = tensor_of<std::int64_t>(memory_, {5});
    op.ids = ids;
    op.logits = row.reshape({1, vocabulary});
    op.streams = streams;
    std::vector<std::int64_t> result(logits.size(), 0);
    for (int i = 0; i < draws; ++i) {
      op.index = static_cast<std::uint64_t>(i);
      run(stream_, op);
      ++result.at(static_cast<std::size_t>(*ids.as<std::int32_t>()));
    }
    return result;
  }

  static Sample with(double temperature, std::int64_t top_k, double top_p) {
    Sample op;
    op.temperature = temperature;
    op.top_k = top_k;
    op.top_p = top_p;
    op.seed = 11;
    return op;
  }
};

TEST_F(Sampling, GreedyTakesTheLowestOfTheLargest) {
  const Tensor logits = tensor_of<float>(memory_, {1, 3, 3, 2, -1, -1, -5, -1, 0, 0, 0, 0});
  const Tensor ids = memory_.empty(Region::cache, DType::i32, {3});
  Sample op;
  op.ids = ids;
  op.logits = logits.reshape({3, 4});
  run(stream_, op);
  EXPECT_EQ(ids.as<std::int32_t>()[0], 1);
  EXPECT_EQ(ids.as<std::int32_t>()[1], 0);
  EXPECT_EQ(ids.as<std::int32_t>()[2], 0);
}

TEST_F(Sampling, FrequenciesFollowTheSoftmaxAtTheTemperature) {
  const std::vector<double> logits = {0.0, 1.0, -1.0, 2.0};
  const int draws = 40000;
  for (const double temperature : {0.7, 1.0, 2.0}) {
    const auto got = counts(logits, with(temperature, 0, 1.0), draws);
    double sum = 0.0;
    for (const double logit : logits) {
      sum += std::exp(logit / temperature);
    }
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const double p = std::exp(logits[i] / temperature) / sum;
      const double deviation = std::sqrt(draws * p * (1.0 - p));
      EXPECT_NEAR(static_cast<double>(got[i]), draws * p, 4.5 * deviation);
    }
  }
}

TEST_F(Sampling, TopKKeepsTheLargestAndTheLowestOfATie) {
  const auto got = counts({1.0, 0.0, 1.0, 2.0, 1.0}, with(1.0, 2, 1.0), 2000);
  EXPECT_GT(got[0], 0);
  EXPECT_GT(got[3], 0);
  EXPECT_EQ(got[0] + got[3], 2000);
  EXPECT_EQ(counts({1.0, 0.0, 3.0}, with(1.0, 1, 1.0), 50)[2], 50);
}

TEST_F(Sampling, TopPKeepsTheSmallestSetThatReachesIt) {
  // Probabilities 0.5, 0.25, 0.125, 0.125.
  const double step = std::log(2.0);
  const std::vector<double> logits = {-step, 0.0, -2.0 * step, -2.0 * step};
  EXPECT_EQ(counts(logits, with(1.0, 0, 0.4), 200)[1], 200);
  const auto two = counts(logits, with(1.0, 0, 0.7), 2000);
  EXPECT_GT(two[0], 0);
  EXPECT_EQ(two[0] + two[1], 2000);
  const auto three = counts(logits, with(1.0, 0, 0.8), 2000);
  EXPECT_GT(three[2], 0);
  EXPECT_EQ(three[3], 0);
  // Of the two that top_k keeps, the first alone holds 2/3.
  EXPECT_EQ(counts(logits, with(1.0, 2, 0.6), 200)[1], 200);
}

TEST_F(Sampling, FiltersThatKeepAllChangeNothing) {
  const std::vector<double> logits = {0.3, -1.0, 0.8, 0.1, 0.0};
  const auto plain = counts(logits, with(1.0, 0, 1.0), 500);
  EXPECT_EQ(counts(logits, with(1.0, 5, 1.0), 500), plain);
  EXPECT_EQ(counts(logits, with(1.0, 99, 1.0), 500), plain);
  EXPECT_EQ(counts(logits, with(1.0, 0, 1.0 - 1e-12), 500), plain);
}

TEST_F(Sampling, ARowDependsOnItsStreamAndIndexAlone) {
  const Tensor logits = normal(DType::f32, {6, 50}, 1);
  const Tensor all = memory_.empty(Region::cache, DType::i32, {6});
  const Tensor one = memory_.empty(Region::cache, DType::i32, {1});
  const Tensor streams = tensor_of<std::int64_t>(memory_, {7, 3, 9, 3, 1, 0});
  Sample op = with(1.3, 0, 0.9);
  op.ids = all;
  op.logits = logits;
  op.streams = streams;
  op.index = 4;
  run(stream_, op);
  for (std::int64_t row = 0; row < 6; ++row) {
    op.ids = one;
    op.logits = ConstTensorView(logits).rows(row, row + 1);
    op.streams = ConstTensorView(streams).rows(row, row + 1);
    run(stream_, op);
    EXPECT_EQ(*one.as<std::int32_t>(), all.as<std::int32_t>()[row]);
  }
}

TEST_F(Sampling, SkipsImpossibleIds) {
  const double impossible = -std::numeric_limits<double>::infinity();
  const auto got = counts({impossible, 0.0, impossible, 0.0, impossible}, with(1.0, 0, 1.0), 400);
  EXPECT_EQ(got[1] + got[3], 400);
}

TEST_F(Sampling, TakesNoRows) {
  const Tensor ids = memory_.empty(Region::cache, DType::i32, {0});
  const Tensor logits = memory_.empty(Region::cache, DType::f32, {0, 8});
  Sample op;
  op.ids = ids;
  op.logits = logits;
  EXPECT_NO_THROW(run(stream_, op));
}

TEST_F(Sampling, RefusesMeaninglessSettings) {
  EXPECT_THROW(counts({0.0, 1.0}, with(-1.0, 0, 1.0), 1), Error);
  EXPECT_THROW(counts({0.0, 1.0}, with(1.0, -1, 1.0), 1), Error);
  EXPECT_THROW(counts({0.0, 1.0}, with(1.0, 0, 0.0), 1), Error);
  EXPECT_THROW(counts({0.0, 1.0}, with(1.0, 0, 1.5), 1), Error);
  const Tensor ids = memory_.empty(Region::cache, DType::i32, {1});
  const Tensor logits = normal(DType::f32, {1, 4}, 1);
  Sample without_streams = with(1.0, 0, 1.0);
  without_streams.ids = ids;
  without_streams.logits = logits;
  EXPECT_THROW(run(stream_, without_streams), Error);
}

}  // namespace

}  // namespace bifocal::test
