// Measures do not depend on how many ranks share the rows, nor on whether their number divides.
#include <gtest/gtest.h>

#include "evaluate/validation.h"
#include "support/compare.h"
#include "support/mpi_world.h"
#include "support/tiny_model.h"

namespace bifocal::test {

namespace {

constexpr std::int64_t kVocabulary = 53;
constexpr std::int64_t kRows = 5;  // no multiple of 2, 3 or 4

Row some_row(std::int64_t index) {
  return random_row(index, 60, kVocabulary);
}

struct Measures {
  Divergence divergence;
  BranchShares branches;
  std::vector<Evaluator::ReachPoint> reach;
};

Measures measure(Communicator& world) {
  Device device(DType::f64);
  const ModelConfig config = tiny_teacher();
  TinyModel teacher(device.context(), config, world, Weights::Placement::sharded, 1);
  TinyModel student(device.context(),
                    tiny_student(config, tiny_students(config)[2].mixers),
                    world,
                    Weights::Placement::sharded,
                    2);
  Evaluator evaluator(device.context(), world, 16);
  const Validation found = validate(
      device.context(), evaluator, world, student.decoder(), teacher.decoder(), some_row, kRows);
  return {
      found.divergence, found.branches, evaluator.reach(student.decoder(), some_row, kRows, 3, 7)};
}

// Counts are exact; other sums are formed in another order, in double.
TEST(DivergenceRanks, EqualThatOfOneRank) {
  const Measures got = measure(test_world());
  const Measures want = measure(*make_self_communicator());
  ASSERT_EQ(got.divergence.by_position.size(), want.divergence.by_position.size());
  for (std::size_t i = 0; i < want.divergence.by_position.size(); ++i) {
    const DivergenceSums& a = got.divergence.by_position[i];
    const DivergenceSums& b = want.divergence.by_position[i];
    EXPECT_EQ(a.tokens, b.tokens);
    EXPECT_EQ(a.agreements, b.agreements);
    EXPECT_EQ(a.predicted, b.predicted);
    EXPECT_NEAR(a.kl, b.kl, 1e-12 * b.kl);
    EXPECT_NEAR(a.student_ce, b.student_ce, 1e-12 * b.student_ce);
    EXPECT_NEAR(a.teacher_ce, b.teacher_ce, 1e-12 * b.teacher_ce);
  }
  for (std::size_t layer = 0; layer < want.branches.gate_means.size(); ++layer) {
    EXPECT_NEAR(got.branches.gate_means[layer], want.branches.gate_means[layer], 1e-12);
    EXPECT_NEAR(got.branches.far_shares[layer], want.branches.far_shares[layer], 1e-12);
  }
  ASSERT_EQ(got.reach.size(), want.reach.size());
  for (std::size_t i = 0; i < want.reach.size(); ++i) {
    EXPECT_EQ(got.reach[i].samples, want.reach[i].samples);
    EXPECT_NEAR(got.reach[i].mean_kl, want.reach[i].mean_kl, 1e-12 * want.reach[i].mean_kl);
  }
}

}  // namespace

}  // namespace bifocal::test
