// What is read off a student's branches while it is compared with its teacher.
#include "evaluate/validation.h"

#include <cmath>

#include <gtest/gtest.h>

#include "support/tiny_model.h"

namespace bifocal::test {

namespace {

constexpr std::int64_t kRows = 3;

Row some_row(std::int64_t index) {
  return random_row(index, 70, 53);
}

std::string gate(std::int64_t layer, const char* part) {
  return "model.layers." + std::to_string(layer) + ".mixer.o_gate." + part;
}

class ValidationTest : public testing::Test {
 protected:
  // Every gate is sigmoid(bias).
  void fix_gates(TinyModel& student, double bias) {
    for (std::int64_t layer = 0; layer < student.config().layers; ++layer) {
      student.change(gate(layer, "weight"), [](double, std::int64_t) { return 0.0; });
      student.change(gate(layer, "bias"), [bias](double, std::int64_t) { return bias; });
    }
  }

  Validation measure(TinyModel& student) {
    Evaluator evaluator(device_.context(), *self_, 16);
    return validate(device_.context(),
                    evaluator,
                    *self_,
                    student.decoder(),
                    teacher_.decoder(),
                    some_row,
                    kRows);
  }

  ModelConfig with(std::size_t mixers) const {
    return tiny_student(tiny_teacher(), tiny_students(tiny_teacher())[mixers].mixers);
  }

  Device device_{DType::f64};
  std::unique_ptr<Communicator> self_ = make_self_communicator();
  TinyModel teacher_{device_.context(), tiny_teacher(), *self_};
};

TEST_F(ValidationTest, GateMeansAreThoseOfTheGates) {
  TinyModel student(device_.context(), with(2), *self_);
  fix_gates(student, -1.5);
  const Validation found = measure(student);
  EXPECT_EQ(found.rows, kRows);
  ASSERT_EQ(found.branches.gate_means.size(), 3U);
  for (const double mean : found.branches.gate_means) {
    EXPECT_NEAR(mean, 1.0 / (1.0 + std::exp(1.5)), 1e-12);
  }
}

// A closed gate leaves nothing that the far branch could lose, an open one nothing else.
TEST_F(ValidationTest, TheFarBranchsShareFollowsTheGate) {
  TinyModel student(device_.context(), with(2), *self_);
  for (const double share : {0.0, 1.0}) {
    fix_gates(student, share == 0.0 ? -800.0 : 800.0);
    for (const double got : measure(student).branches.far_shares) {
      EXPECT_NEAR(got, share, 1e-12);
    }
  }
  fix_gates(student, 0.0);
  for (const double got : measure(student).branches.far_shares) {
    EXPECT_GT(got, 0.01);
    EXPECT_TRUE(std::isfinite(got));
  }
}

TEST_F(ValidationTest, LayersWithoutABranchHaveNoNumber) {
  // Full attention, pinned tokens with states summed, states alone.
  TinyModel student(device_.context(), with(4), *self_);
  const BranchShares branches = measure(student).branches;
  ASSERT_EQ(branches.gate_means.size(), 3U);
  for (const double mean : branches.gate_means) {
    EXPECT_TRUE(std::isnan(mean));
  }
  EXPECT_TRUE(std::isnan(branches.far_shares[0]));
  EXPECT_GT(branches.far_shares[1], 0.0);
  EXPECT_TRUE(std::isnan(branches.far_shares[2]));
  TinyModel window(device_.context(), with(0), *self_);
  EXPECT_TRUE(measure(window).branches.gate_means.empty());
}

TEST_F(ValidationTest, WatchingChangesNoDivergence) {
  TinyModel student(device_.context(), with(2), *self_);
  const Divergence plain = Evaluator(device_.context(), *self_, 16)
                               .divergence(student.decoder(), teacher_.decoder(), some_row, kRows);
  const Divergence watched = measure(student).divergence;
  ASSERT_EQ(watched.by_position.size(), plain.by_position.size());
  for (std::size_t i = 0; i < plain.by_position.size(); ++i) {
    EXPECT_EQ(watched.by_position[i].kl, plain.by_position[i].kl);
    EXPECT_EQ(watched.by_position[i].tokens, plain.by_position[i].tokens);
  }
}

}  // namespace

}  // namespace bifocal::test
