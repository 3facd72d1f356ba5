// What the losses of both stages must give in cases whose answer is known, and their gradients by
// finite differences.
#include "distill/stage.h"

#include <cmath>

#include <gtest/gtest.h>

#include "distill/align_stage.h"
#include "distill/logit_stage.h"
#include "support/compare.h"
#include "support/tiny_model.h"

namespace bifocal::test {

namespace {

constexpr std::int64_t kVocabulary = 53;

// A teacher, a student and a stage on one rank.
class Bench {
 public:
  // Equal seeds give the student its teacher's weights.
  Bench(DType dtype,
        const ModelConfig& teacher,
        const std::vector<MixerSettings>& mixers,
        std::uint64_t student_seed = 2)
      : device_(dtype),
        teacher_(device_.context(), teacher, mesh_.world(), Weights::Placement::replicated, 1),
        student_(device_.context(),
                 tiny_student(teacher, mixers),
                 mesh_.world(),
                 Weights::Placement::replicated,
                 student_seed),
        gradients_(device_.context(), student_.table(), mesh_.world()) {}

  TinyModel& student() { return student_; }

  StepResult distill(const StageRows& rows,
                     const LogitLossOptions& options,
                     std::int64_t step = 0) {
    return run(LogitStage(device_.context(),
                          student_.decoder(),
                          &teacher_.decoder(),
                          mesh_,
                          TeacherPlacement::look_ahead,
                          Recompute::none,
                          options,
                          rows),
               step);
  }

  StepResult pretrain(const StageRows& rows) {
    return run(LogitStage(device_.context(),
                          student_.decoder(),
                          nullptr,
                          mesh_,
                          TeacherPlacement::look_ahead,
                          Recompute::none,
                          {.ce_share = 1.0, .chunk = 16},
                          rows),
               0);
  }

  StepResult align(const StageRows& rows, AlignTrainable trainable, TeacherPlacement placement) {
    return run(AlignStage(device_.context(),
                          student_.decoder(),
                          teacher_.decoder(),
                          mesh_,
                          placement,
                          trainable,
                          rows),
               0);
  }

  // Of the last step.
  NamedValues gradients() {
    return whole_gradients(student_.table(), gradients_, mesh_.world(), factors_);
  }

 private:
  template <class SomeStage>
  StepResult run(SomeStage stage, std::int64_t step) {
    gradients_.clear();
    StepResult result = stage.run_step(step, gradients_);
    factors_ = result.unit_factors;
    return result;
  }

  Device device_;
  Mesh mesh_{make_self_communicator(), {.data = 1, .sequence = 1}};
  TinyModel teacher_;
  TinyModel student_;
  Gradients gradients_;
  std::vector<double> factors_;
};

StageRows some_rows(const Masked& masked = {}) {
  return stage_rows(
      [masked](std::int64_t position) { return random_row(position, 41, kVocabulary, masked); },
      2,
      4);
}

const Masked kAll = [](std::int64_t, std::int64_t) { return true; };

TEST(Stage, AStudentThatEqualsItsTeacherHasNothingToLearn) {
  for (const Family family : {Family::qwen3, Family::qwen2, Family::llama}) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      const ModelConfig teacher = tiny_teacher(family);
      Bench bench(dtype, teacher, teacher.mixers, 1);
      for (const double temperature : {1.0, 2.0}) {
        const StepResult result =
            bench.distill(some_rows(), {.temperature = temperature, .chunk = 16});
        EXPECT_EQ(result.loss, 0.0);
        EXPECT_EQ(result.kl, 0.0);
        EXPECT_GT(result.kept, 0.0);
        EXPECT_EQ(largest(bench.gradients()), 0.0);
      }
      const StepResult result =
          bench.align(some_rows(), AlignTrainable::mixer, TeacherPlacement::look_ahead);
      EXPECT_EQ(result.loss, 0.0);
      EXPECT_EQ(largest(bench.gradients()), 0.0);
    }
  }
}

TEST(Stage, AStudentWithOtherMixersHasSomethingToLearn) {
  const ModelConfig teacher = tiny_teacher();
  for (const NamedMixers& student : tiny_students(teacher)) {
    SCOPED_TRACE(student.name);
    Bench bench(DType::f64, teacher, student.mixers, 1);
    EXPECT_GT(bench.distill(some_rows(), {}).kl, 1e-4);
    EXPECT_GT(largest(bench.gradients()), 1e-4);
  }
}

TEST(Stage, WithoutKeptTokensEverythingIsZero) {
  const ModelConfig teacher = tiny_teacher();
  for (const NamedMixers& student : tiny_students(teacher)) {
    Bench bench(DType::f32, teacher, student.mixers);
    const auto expect_nothing = [&](const StepResult& result) {
      EXPECT_EQ(result.kept, 0.0);
      EXPECT_EQ(result.loss, 0.0);
      EXPECT_EQ(result.kl, 0.0);
      EXPECT_EQ(result.ce, 0.0);
      EXPECT_EQ(largest(bench.gradients()), 0.0);
      for (const double factor : result.unit_factors) {
        EXPECT_TRUE(std::isfinite(factor));
      }
    };
    const StageRows rows = some_rows(kAll);
    expect_nothing(bench.distill(rows, {}));
    expect_nothing(bench.distill(rows, {.temperature = 2.0, .ce_share = 0.4, .chunk = 5}));
    expect_nothing(bench.pretrain(rows));
    expect_nothing(bench.align(rows, AlignTrainable::mixer, TeacherPlacement::look_ahead));
  }
}

TEST(Stage, ADocumentsLastTokenCountsForTheDivergenceAlone) {
  const ModelConfig teacher = tiny_teacher();
  Bench bench(DType::f64, teacher, tiny_students(teacher)[0].mixers);
  // Documents of one token: none has a successor.
  const StageRows rows = stage_rows(
      [](std::int64_t) {
        Row row = packed_row({1, 1, 1}, kVocabulary, 2);
        row.keep = {1, 1, 1};
        return row;
      },
      1,
      1);
  const StepResult result = bench.distill(rows, {.ce_share = 0.5});
  EXPECT_EQ(result.kept, 3.0);
  EXPECT_EQ(result.ce, 0.0);
  EXPECT_GT(result.kl, 0.0);
  EXPECT_DOUBLE_EQ(result.loss, 0.5 * result.kl);
}

TEST(Stage, ChunksOfLogitsChangeOnlyTheRounding) {
  const ModelConfig teacher = tiny_teacher(Family::llama);
  Bench bench(DType::f64, teacher, tiny_students(teacher)[3].mixers);
  const LogitLossOptions whole{.temperature = 1.5, .ce_share = 0.3, .chunk = 1000};
  const double loss = bench.distill(some_rows(), whole).loss;
  const NamedValues want = bench.gradients();
  for (const std::int64_t chunk : {1, 7, 41}) {
    LogitLossOptions options = whole;
    options.chunk = chunk;
    EXPECT_NEAR(bench.distill(some_rows(), options).loss, loss, 1e-13 * loss);
    for (const auto& [name, gradient] : bench.gradients()) {
      EXPECT_WITHIN(gradient, want.at(name), 1e-12 * largest(want));
    }
  }
}

// 2 rows in one step = 1 + 1 rows weighted by their kept tokens.
TEST(Stage, TokensWeighAlikeHoweverTheyAreSpreadOverRows) {
  const ModelConfig teacher = tiny_teacher();
  Bench bench(DType::f64, teacher, tiny_students(teacher)[2].mixers);
  const StageRows both = some_rows();
  const StepResult whole = bench.distill(both, {});
  double sum = 0.0;
  double kept = 0.0;
  for (std::int64_t position = 0; position < 2; ++position) {
    StageRows one = both;
    one.per_step = 1;
    const StepResult result = bench.distill(one, {}, position);
    sum += result.loss * result.kept;
    kept += result.kept;
  }
  EXPECT_EQ(kept, whole.kept);
  EXPECT_NEAR(sum / kept, whole.loss, 1e-12 * whole.loss);
}

TEST(Stage, LaterStepsReadLaterRows) {
  const ModelConfig teacher = tiny_teacher();
  Bench bench(DType::f64, teacher, tiny_students(teacher)[0].mixers);
  StageRows shifted = some_rows();
  shifted.first = 4;
  EXPECT_EQ(bench.distill(some_rows(), {}, 2).loss, bench.distill(shifted, {}, 0).loss);
  EXPECT_NE(bench.distill(some_rows(), {}, 0).loss, bench.distill(shifted, {}, 0).loss);
}

TEST(Stage, AlignNeedsNoGradientOutsideTheMixers) {
  const ModelConfig teacher = tiny_teacher();
  for (const NamedMixers& student : tiny_students(teacher)) {
    Bench bench(DType::f64, teacher, student.mixers);
    for (const AlignTrainable trainable : {AlignTrainable::new_tensors, AlignTrainable::mixer}) {
      bench.align(some_rows(), trainable, TeacherPlacement::look_ahead);
      const NamedValues gradients = bench.gradients();
      for (const Parameter& parameter : bench.student().table().parameters()) {
        const bool trains =
            parameter.is_new() || (trainable == AlignTrainable::mixer && parameter.in_mixer);
        if (!trains) {
          for (const double value : gradients.at(parameter.name)) {
            ASSERT_EQ(value, 0.0);
          }
        }
      }
    }
  }
}

// On one rank ulysses and look-ahead do the same.
TEST(Stage, PlacementsAgreeOnOneRank) {
  const ModelConfig teacher = tiny_teacher();
  Bench bench(DType::f32, teacher, tiny_students(teacher)[2].mixers);
  const double ahead =
      bench.align(some_rows(), AlignTrainable::new_tensors, TeacherPlacement::look_ahead).loss;
  const NamedValues gradients = bench.gradients();
  EXPECT_EQ(bench.align(some_rows(), AlignTrainable::new_tensors, TeacherPlacement::ulysses).loss,
            ahead);
  EXPECT_EQ(bench.gradients(), gradients);
}

// Directional derivatives, of every tensor at once along its own gradient's signs: fourth-order
// differences in double, whose rounding of 1e-13 over a step of 1e-3 and truncation stay below 1e-8
// of the slope.
void expect_finite_differences(Bench& bench, const std::function<double()>& loss) {
  loss();
  const NamedValues gradients = bench.gradients();
  const double scale = largest(gradients);
  for (const Parameter& parameter : bench.student().table().parameters()) {
    const std::vector<double>& gradient = gradients.at(parameter.name);
    const auto move = [&](double offset) {
      bench.student().change(parameter.name, [&](double value, std::int64_t i) {
        return value + (gradient[static_cast<std::size_t>(i)] < 0.0 ? -offset : offset);
      });
    };
    double slope = 0.0;
    for (const double value : gradient) {
      slope += std::abs(value);
    }
    constexpr double kStep = 1e-4;
    const auto at = [&](double offset) {
      move(offset);
      const double value = loss();
      move(-offset);
      return value;
    };
    const double difference =
        (8.0 * (at(kStep) - at(-kStep)) - (at(2.0 * kStep) - at(-2.0 * kStep))) / (12.0 * kStep);
    EXPECT_NEAR(difference, slope, 1e-6 * std::max(slope, scale)) << parameter.name;
  }
}

TEST(Stage, PretrainingGradientsMatchFiniteDifferencesInEveryFamily) {
  for (const Family family : {Family::qwen3, Family::qwen2, Family::llama}) {
    const ModelConfig teacher = tiny_teacher(family);
    Bench bench(DType::f64, teacher, teacher.mixers);
    expect_finite_differences(bench, [&] { return bench.pretrain(some_rows()).loss; });
  }
}

TEST(Stage, DistillingGradientsMatchFiniteDifferencesWithBiases) {
  const ModelConfig teacher = tiny_teacher(Family::qwen2);
  Bench bench(DType::f64, teacher, tiny_students(teacher)[4].mixers);
  expect_finite_differences(bench, [&] {
    return bench.distill(some_rows(), {.temperature = 1.5, .ce_share = 0.4, .chunk = 16}).loss;
  });
}

}  // namespace

}  // namespace bifocal::test
