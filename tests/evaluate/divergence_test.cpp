// Divergences whose value is known, and how far windows reach.
#include "evaluate/divergence.h"

#include <cmath>

#include <gtest/gtest.h>

#include "model/row_shard.h"
#include "support/compare.h"
#include "support/tiny_model.h"

namespace bifocal::test {

namespace {

constexpr std::int64_t kVocabulary = 53;
constexpr std::int64_t kRows = 3;

Row some_row(std::int64_t index) {
  return random_row(index, 70, kVocabulary);
}

class Examiner {
 public:
  explicit Examiner(DType dtype = DType::f64) : device_(dtype) {}

  std::unique_ptr<TinyModel> model(const ModelConfig& config, std::uint64_t seed = 1) {
    return std::make_unique<TinyModel>(
        device_.context(), config, *self_, Weights::Placement::replicated, seed);
  }

  Divergence divergence(TinyModel& student, TinyModel& teacher, std::int64_t chunk = 16) {
    return Evaluator(device_.context(), *self_, chunk)
        .divergence(student.decoder(), teacher.decoder(), some_row, kRows);
  }

  std::vector<Evaluator::ReachPoint> reach(TinyModel& model,
                                           const EvaluationRows& rows,
                                           std::int64_t count,
                                           std::uint64_t seed = 1) {
    return Evaluator(device_.context(), *self_, 16).reach(model.decoder(), rows, count, 20, seed);
  }

 private:
  Device device_;
  std::unique_ptr<Communicator> self_ = make_self_communicator();
};

TEST(Divergence, AModelDoesNotDivergeFromItself) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    Examiner examiner(dtype);
    const auto teacher = examiner.model(tiny_teacher());
    const auto student = examiner.model(tiny_teacher());
    const DivergenceSums all = examiner.divergence(*student, *teacher).all();
    EXPECT_EQ(all.kl, 0.0);
    EXPECT_EQ(all.agreement(), 1.0);
    EXPECT_EQ(all.student_ce, all.teacher_ce);
    EXPECT_GT(all.student_perplexity(), 1.0);
  }
}

TEST(Divergence, CountsEveryKeptTokenInTheBucketOfItsPosition) {
  Examiner examiner;
  const auto teacher = examiner.model(tiny_teacher());
  const auto student = examiner.model(tiny_teacher(), 2);
  const Divergence divergence = examiner.divergence(*student, *teacher);
  std::vector<double> tokens(divergence.by_position.size(), 0.0);
  double kept = 0.0;
  double with_next = 0.0;
  for (std::int64_t index = 0; index < kRows; ++index) {
    const Row row = some_row(index);
    kept += count_kept(row).kept;
    with_next += count_kept(row).with_next;
    for (std::size_t token = 0; token < row.ids.size(); ++token) {
      const double position = static_cast<double>(token) - row.start[token] + 1.0;
      if (row.keep[token] != 0) {
        tokens.at(static_cast<std::size_t>(std::floor(std::log2(position)))) += 1.0;
      }
    }
  }
  for (std::size_t bucket = 0; bucket < tokens.size(); ++bucket) {
    EXPECT_EQ(divergence.by_position[bucket].tokens, tokens[bucket]) << bucket;
  }
  EXPECT_GT(tokens.back(), 0.0);
  EXPECT_EQ(divergence.all().tokens, kept);
  EXPECT_EQ(divergence.all().predicted, with_next);
}

TEST(Divergence, PositionsAddUpToAllAndDifferentModelsDiverge) {
  Examiner examiner;
  const auto teacher = examiner.model(tiny_teacher());
  const auto student = examiner.model(tiny_teacher(), 2);
  const Divergence divergence = examiner.divergence(*student, *teacher);
  double kl = 0.0;
  double agreements = 0.0;
  for (const DivergenceSums& sums : divergence.by_position) {
    EXPECT_GE(sums.kl, 0.0);
    kl += sums.kl;
    agreements += sums.agreements;
  }
  const DivergenceSums all = divergence.all();
  EXPECT_DOUBLE_EQ(all.kl, kl);
  EXPECT_EQ(all.agreements, agreements);
  EXPECT_GT(all.mean_kl(), 0.1);
  EXPECT_LT(all.agreement(), 0.9);
  EXPECT_DOUBLE_EQ(all.mean_kl(), kl / all.tokens);
}

TEST(Divergence, ChunksOfLogitsChangeOnlyTheRounding) {
  Examiner examiner;
  const auto teacher = examiner.model(tiny_teacher());
  const auto student = examiner.model(tiny_teacher(), 2);
  const DivergenceSums want = examiner.divergence(*student, *teacher, 1000).all();
  for (const std::int64_t chunk : {1, 7}) {
    const DivergenceSums got = examiner.divergence(*student, *teacher, chunk).all();
    EXPECT_NEAR(got.kl, want.kl, 1e-12 * want.kl);
    EXPECT_NEAR(got.student_ce, want.student_ce, 1e-12 * want.student_ce);
    EXPECT_EQ(got.tokens, want.tokens);
  }
}

TEST(Divergence, WithoutTokensNothingIsMeasured) {
  const DivergenceSums nothing = Divergence{}.all();
  EXPECT_EQ(nothing.mean_kl(), 0.0);
  EXPECT_EQ(nothing.agreement(), 0.0);
  EXPECT_EQ(nothing.student_perplexity(), 1.0);
}

Row one_document(std::int64_t index) {
  return packed_row({120}, kVocabulary, 30 + static_cast<std::uint64_t>(index));
}

// A window of W over L layers sees the L * (W - 1) tokens before a token, and none before them.
TEST(Reach, EndsWhereTheWindowsOfAllLayersEnd) {
  const ModelConfig teacher = tiny_teacher();
  for (const std::int64_t window : {1, 4, 12}) {
    MixerSettings mixer{.window = window, .sink = Sink::learned};
    Examiner examiner;
    const auto model = examiner.model(tiny_student(teacher, std::vector<MixerSettings>(3, mixer)));
    const auto points = examiner.reach(*model, one_document, 4);
    ASSERT_GE(points.size(), 6U);
    for (const Evaluator::ReachPoint& point : points) {
      EXPECT_GT(point.samples, 0.0);
      if (point.distance > 3 * (window - 1)) {
        EXPECT_EQ(point.mean_kl, 0.0) << "window " << window << ", distance " << point.distance;
      } else if (point.distance < window) {
        EXPECT_GT(point.mean_kl, 1e-6) << "window " << window << ", distance " << point.distance;
      }
    }
  }
}

TEST(Reach, StatesAndFullAttentionSeeTheWholeDocument) {
  const ModelConfig teacher = tiny_teacher();
  const MixerSettings far{.window = 4, .sink = Sink::learned, .states = States::kv};
  for (const MixerSettings& mixer : {MixerSettings{}, far}) {
    Examiner examiner;
    const auto model = examiner.model(tiny_student(teacher, std::vector<MixerSettings>(3, mixer)));
    for (const Evaluator::ReachPoint& point : examiner.reach(*model, one_document, 4)) {
      EXPECT_GT(point.mean_kl, 0.0) << point.distance;
    }
  }
}

TEST(Reach, DistancesArePowersOfTwoInsideDocuments) {
  Examiner examiner;
  const auto model = examiner.model(tiny_teacher());
  const auto rows = [](std::int64_t) { return packed_row({9, 9, 9, 9}, kVocabulary, 3); };
  const auto points = examiner.reach(*model, rows, 2);
  ASSERT_LE(points.size(), 4U);  // no document has a distance of 16
  for (std::size_t k = 0; k < points.size(); ++k) {
    EXPECT_EQ(points[k].distance, std::int64_t{1} << k);
    EXPECT_LE(points[k].samples, 40.0);
  }
}

TEST(Reach, FollowsItsSeed) {
  Examiner examiner;
  const auto model = examiner.model(tiny_teacher());
  const auto first = examiner.reach(*model, one_document, 2, 1);
  const auto again = examiner.reach(*model, one_document, 2, 1);
  const auto other = examiner.reach(*model, one_document, 2, 2);
  EXPECT_EQ(first[0].mean_kl, again[0].mean_kl);
  EXPECT_NE(first[0].mean_kl, other[0].mean_kl);
}

}  // namespace

}  // namespace bifocal::test
