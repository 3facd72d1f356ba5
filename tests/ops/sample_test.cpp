// Drawing tokens.
#include "ops/sample.h"

#include <algorithm>
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
    const Tensor indices = tensor_of<std::int64_t>(memory_, {0});
    op.indices = indices;
    std::vector<std::int64_t> result(logits.size(), 0);
    for (int i = 0; i < draws; ++i) {
      *indices.as<std::int64_t>() = i;
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

TEST_F(Sampling, TopKKeepsTheLargestAndAllThatTieWithTheLast) {
  const auto got = counts({1.0, 0.0, 1.0, 2.0, 1.0}, with(1.0, 2, 1.0), 2000);
  EXPECT_GT(got[0], 0);
  EXPECT_GT(got[2], 0);
  EXPECT_GT(got[3], 0);
  EXPECT_GT(got[4], 0);
  EXPECT_EQ(got[1], 0);
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
  EXPECT_EQ(three[2], 0);
  EXPECT_GT(three[3], 0);
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
  const Tensor indices = tensor_of<std::int64_t>(memory_, {4, 4, 0, 2, 4, 9});
  op.indices = indices;
  run(stream_, op);
  for (std::int64_t row = 0; row < 6; ++row) {
    op.ids = one;
    op.logits = ConstTensorView(logits).rows(row, row + 1);
    op.streams = ConstTensorView(streams).rows(row, row + 1);
    op.indices = ConstTensorView(indices).rows(row, row + 1);
    run(stream_, op);
    EXPECT_EQ(*one.as<std::int32_t>(), all.as<std::int32_t>()[row]);
  }
}

// transformers' warpers in double: the logits over the temperature; those below the top_k-th become
// impossible; in increasing order (stable) those whose cumulative probability is at most 1 - top_p,
// the last one excepted.
std::vector<double> warped(const std::vector<double>& logits, const Sample& op) {
  constexpr double kImpossible = -std::numeric_limits<double>::infinity();
  std::vector<double> scores = logits;
  for (double& score : scores) {
    score /= op.temperature;
  }
  std::vector<double> sorted = scores;
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  if (op.top_k > 0) {
    const auto k = std::min<std::size_t>(static_cast<std::size_t>(op.top_k), sorted.size());
    for (double& score : scores) {
      score = score < sorted[k - 1] ? kImpossible : score;
    }
  }
  const auto softmax = [&] {
    std::vector<double> p;
    for (const double score : scores) {
      p.push_back(std::exp(score - sorted[0]));
    }
    const double total = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& value : p) {
      value /= total;
    }
    return p;
  };
  if (op.top_p < 1.0) {
    const std::vector<double> p = softmax();
    std::vector<std::size_t> order(p.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return scores[a] < scores[b];
    });
    double cumulative = 0.0;
    for (std::size_t i = 0; i + 1 < order.size(); ++i) {
      cumulative += p[order[i]];
      if (cumulative <= 1.0 - op.top_p) {
        scores[order[i]] = kImpossible;
      }
    }
  }
  return softmax();
}

// Pearson's statistic over the possible ids; those that are expected less than ten times are one
// bin. With d degrees of freedom its mean is d and its deviation sqrt(2 d); six deviations and a
// little for its skewness are passed once in some millions.
void expect_frequencies(const std::vector<std::int64_t>& got,
                        const std::vector<double>& p,
                        double draws) {
  constexpr double kLeastExpected = 10.0;
  double statistic = 0.0;
  double freedom = -1.0;
  double rare_expected = 0.0;
  double rare_got = 0.0;
  const auto add = [&](double count, double expected) {
    statistic += (count - expected) * (count - expected) / expected;
    freedom += 1.0;
  };
  for (std::size_t i = 0; i < p.size(); ++i) {
    const auto count = static_cast<double>(got[i]);
    if (p[i] == 0.0) {
      ASSERT_EQ(got[i], 0) << "id " << i;
    } else if (draws * p[i] < kLeastExpected) {
      rare_expected += draws * p[i];
      rare_got += count;
    } else {
      add(count, draws * p[i]);
    }
  }
  if (rare_expected >= kLeastExpected) {
    add(rare_got, rare_expected);
  }
  EXPECT_LT(statistic, freedom + 6.0 * std::sqrt(2.0 * std::max(freedom, 0.0)) + 12.0);
}

TEST_F(Sampling, FrequenciesFollowTransformersWarpers) {
  constexpr int kDraws = 3000;
  std::vector<double> logits;
  for (std::uint64_t i = 0; i < 300; ++i) {
    // Steps of 1/4, so that many ids tie.
    logits.push_back(std::round(8.0 * random_normal(3, 0, i)) / 4.0);
  }
  for (const double temperature : {0.6, 1.0, 1.7}) {
    for (const std::int64_t top_k : {0, 1, 17, 50, 400}) {
      for (const double top_p : {0.05, 0.5, 0.9, 0.97, 1.0}) {
        SCOPED_TRACE(fmt::format("temperature {}, top_k {}, top_p {}", temperature, top_k, top_p));
        const Sample op = with(temperature, top_k, top_p);
        expect_frequencies(counts(logits, op, kDraws), warped(logits, op), kDraws);
      }
    }
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
