// Losses on logits against plain sums in double.
#include "ops/distill_loss.h"

#include "support/op_test.h"

namespace bifocal::test {

namespace {

std::vector<double> log_softmax(const double* logits, std::size_t size, double temperature) {
  const double largest = *std::max_element(logits, logits + size) / temperature;
  double sum = 0.0;
  for (std::size_t i = 0; i < size; ++i) {
    sum += std::exp(logits[i] / temperature - largest);
  }
  std::vector<double> result(size);
  for (std::size_t i = 0; i < size; ++i) {
    result[i] = logits[i] / temperature - largest - std::log(sum);
  }
  return result;
}

struct Expected {
  std::vector<double> kl, ce, d_student;
};

// rows x vocabulary of the op's stored inputs, with the op's weights.
Expected definition(const DistillLoss& op) {
  const auto vocabulary = static_cast<std::size_t>(op.student.shape[1]);
  const auto student = to_doubles(op.student);
  const auto teacher = to_doubles(op.teacher);
  const double temperature = op.temperature;
  Expected want;
  want.d_student.resize(student.size());
  for (std::size_t t = 0; t < static_cast<std::size_t>(op.student.shape[0]); ++t) {
    const auto q = log_softmax(student.data() + t * vocabulary, vocabulary, temperature);
    const auto p = log_softmax(teacher.data() + t * vocabulary, vocabulary, temperature);
    const auto plain = log_softmax(student.data() + t * vocabulary, vocabulary, 1.0);
    const auto next = static_cast<std::size_t>(op.next.as<std::int32_t>()[t]);
    const double kl_weight = op.kl_weight.as<double>()[t];
    const double ce_weight = op.ce_weight.as<double>()[t];
    double kl = 0.0;
    for (std::size_t i = 0; i < vocabulary; ++i) {
      kl += std::exp(p[i]) * (p[i] - q[i]);
      want.d_student[t * vocabulary + i] =
          kl_weight * temperature * (std::exp(q[i]) - std::exp(p[i])) +
          ce_weight * (std::exp(plain[i]) - (i == next ? 1.0 : 0.0));
    }
    want.kl.push_back(temperature * temperature * kl);
    want.ce.push_back(-plain[next]);
  }
  return want;
}

class Distill : public OpTest {
 protected:
  struct Case {
    Tensor student, teacher, d_student, kl, ce, agree, next, kl_weight, ce_weight;

    DistillLoss op(double temperature) const {
      DistillLoss loss{d_student, kl, ce, agree, student, teacher, next, kl_weight, ce_weight};
      loss.temperature = temperature;
      return loss;
    }
  };

  Case make(DType dtype, std::int64_t rows, std::int64_t vocabulary) {
    Case c{normal(dtype, {rows, vocabulary}, 1, 3.0),
           normal(dtype, {rows, vocabulary}, 2, 3.0),
           empty(dtype, {rows, vocabulary}),
           empty(DType::f64, {rows}),
           empty(DType::f64, {rows}),
           memory_.empty(Region::loss, DType::u8, {rows}),
           memory_.empty(Region::loss, DType::i32, {rows}),
           empty(DType::f64, {rows}),
           empty(DType::f64, {rows})};
    fill_below(c.next, 3, vocabulary);
    fill(c.kl_weight,
         [](std::int64_t t) { return t % 3 == 2 ? 0.0 : 0.25 + 0.1 * static_cast<double>(t); });
    fill(c.ce_weight,
         [](std::int64_t t) { return t % 4 >= 2 ? 0.0 : 0.5 + 0.1 * static_cast<double>(t); });
    return c;
  }
};

TEST_F(Distill, MatchesDefinition) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const std::int64_t rows : {0, 1, 5, 17}) {
      for (const std::int64_t vocabulary : {1, 2, 15, 16, 31, 128, 1001}) {
        for (const double temperature : {1.0, 2.5}) {
          SCOPED_TRACE(fmt::format("{} x {} at {}", rows, vocabulary, temperature));
          const Case c = make(dtype, rows, vocabulary);
          const DistillLoss op = c.op(temperature);
          run(stream_, op);
          const Expected want = definition(op);
          // Logits to 15 in float32 carry 5e-7, probabilities as much.
          const double bound = dtype == DType::f32 ? 2e-6 : 1e-13;
          EXPECT_CLOSE(c.kl, want.kl, bound);
          EXPECT_CLOSE(c.ce, want.ce, bound);
          EXPECT_CLOSE(c.d_student, want.d_student, bound);
        }
      }
    }
  }
}

TEST_F(Distill, GradientMatchesFiniteDifferences) {
  for (const double temperature : {1.0, 1.7}) {
    const Case c = make(DType::f64, 6, 9);
    run(stream_, c.op(temperature));
    const Tensor gradient = doubles(c.d_student);
    DistillLoss values = c.op(temperature);
    values.d_student = {};
    EXPECT_GRADIENT(c.student, gradient, [&] {
      run(stream_, values);
      return weighted_sum(c.kl, c.kl_weight) + weighted_sum(c.ce, c.ce_weight);
    });
  }
}

TEST_F(Distill, EqualLogitsGiveExactZeros) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const double temperature : {1.0, 3.0}) {
      const Case c = make(dtype, 9, 333);
      DistillLoss op = c.op(temperature);
      // A copy at another alignment.
      const Tensor storage = normal(dtype, {9 * 333 + 1}, 1, 3.0);
      dispatch_real("test", dtype, [&]<class T>(T) {
        std::copy_n(c.student.as<T>(), c.student.size(), storage.as<T>() + 1);
      });
      op.teacher = ConstTensorView(storage.rows(1, 9 * 333 + 1).reshape({9, 333}));
      op.ce_weight = {};
      run(stream_, op);
      for (const double value : to_doubles(c.kl)) {
        EXPECT_EQ(value, 0.0);
      }
      for (const double value : to_doubles(c.d_student)) {
        EXPECT_EQ(value, 0.0);
      }
      for (std::int64_t t = 0; t < 9; ++t) {
        EXPECT_EQ(c.agree.as<std::uint8_t>()[t], 1);
      }
    }
  }
}

TEST_F(Distill, SmallDivergencesKeepTheirDigitsInFloat) {
  for (const double distance : {1e-1, 1e-2, 1e-3, 1e-4}) {
    const Case c = make(DType::f32, 8, 1000);
    const auto noise = normal(DType::f64, {8, 1000}, 9, distance);
    fill(c.teacher,
         [&](std::int64_t i) { return c.student.as<float>()[i] + noise.as<double>()[i] + 2.0; });
    const DistillLoss op = c.op(1.0);
    run(stream_, op);
    // The plain double sum itself cancels to about 1e-15; a logit's float32 subtraction carries
    // 1e-6, the divergence is of second order in it.
    const double bound = 1e-6 + 2e-6 / distance;
    EXPECT_CLOSE(c.kl, definition(op).kl, bound);
    for (const double value : to_doubles(c.kl)) {
      EXPECT_GT(value, 0.0);
    }
  }
}

TEST_F(Distill, FarApartLogitsStayFinite) {
  const Tensor student = tensor_of<float>(memory_, {0.0F, 300.0F, -300.0F, 1e4F, 0.0F, -1e4F});
  const Tensor teacher = tensor_of<float>(memory_, {300.0F, 0.0F, -300.0F, -1e4F, 1e4F, 0.0F});
  const Tensor d_student = empty(DType::f32, {2, 3});
  const Tensor kl = empty(DType::f64, {2});
  DistillLoss op;
  op.d_student = d_student;
  op.kl = kl;
  op.student = ConstTensorView(student).reshape({2, 3});
  op.teacher = ConstTensorView(teacher).reshape({2, 3});
  const Tensor ones = tensor_of<double>(memory_, {1.0, 1.0});
  op.kl_weight = ones;
  run(stream_, op);
  const std::vector<double> want_kl = {300.0, 1e4};
  const std::vector<double> want_gradient = {-1.0, 1.0, 0.0, 1.0, -1.0, 0.0};
  EXPECT_CLOSE(kl, want_kl, 1e-6);
  EXPECT_WITHIN(d_student, want_gradient, 1e-6);
}

TEST_F(Distill, AgreesOnTheLowestOfTheLargest) {
  const Tensor student = tensor_of<float>(memory_, {1, 5, 5, 2, 5, 5, 0, 1, 2});
  const Tensor teacher = tensor_of<float>(memory_, {0, 9, 1, 9, 9, 0, 0, 0, 0});
  const Tensor agree = memory_.empty(Region::loss, DType::u8, {3});
  DistillLoss op;
  op.agree = agree;
  op.student = ConstTensorView(student).reshape({3, 3});
  op.teacher = ConstTensorView(teacher).reshape({3, 3});
  run(stream_, op);
  EXPECT_EQ(agree.as<std::uint8_t>()[0], 1);
  EXPECT_EQ(agree.as<std::uint8_t>()[1], 0);
  EXPECT_EQ(agree.as<std::uint8_t>()[2], 0);
}

TEST_F(Distill, GradientMayReplaceTheLogits) {
  for (const double temperature : {1.0, 2.0}) {
    const Case c = make(DType::f32, 13, 77);
    run(stream_, c.op(temperature));
    const Case in_place = make(DType::f32, 13, 77);
    DistillLoss op = in_place.op(temperature);
    op.d_student = in_place.student;
    run(stream_, op);
    EXPECT_SAME_BITS(in_place.student, c.d_student);
    EXPECT_SAME_BITS(in_place.kl, c.kl);
    EXPECT_SAME_BITS(in_place.ce, c.ce);
  }
}

TEST_F(Distill, RowsWithoutWeightGetExactZerosEvenFromNan) {
  const Case c = make(DType::f32, 3, 10);
  fill(c.student.rows(1, 2), [](std::int64_t) { return std::nan(""); });
  c.kl_weight.as<double>()[1] = 0.0;
  c.ce_weight.as<double>()[1] = 0.0;
  run(stream_, c.op(1.0));
  EXPECT_SAME_BITS(c.d_student.rows(1, 2), zeros(DType::f32, {1, 10}));
}

TEST_F(Distill, RowsDoNotDependOnOthersNorOnThreads) {
  const Case c = make(DType::f32, 64, 500);
  with_threads(1, [&] { run(stream_, c.op(1.0)); });
  const Case other = make(DType::f32, 64, 500);
  fill(other.student.rows(10, 11), [](std::int64_t) { return 0.0; });
  with_threads(3, [&] { run(stream_, other.op(1.0)); });
  EXPECT_SAME_BITS(other.d_student.rows(0, 10), c.d_student.rows(0, 10));
  EXPECT_SAME_BITS(other.d_student.rows(11, 64), c.d_student.rows(11, 64));
  EXPECT_SAME_BITS(other.kl.rows(11, 64), c.kl.rows(11, 64));
  EXPECT_SAME_BITS(other.ce.rows(11, 64), c.ce.rows(11, 64));
}

TEST_F(Distill, WithoutTeacherIsTheNextTokenLoss) {
  const Case c = make(DType::f32, 8, 40);
  DistillLoss op = c.op(1.0);
  Expected want = [&] {
    fill(c.kl_weight, [](std::int64_t) { return 0.0; });
    return definition(op);
  }();
  op.teacher = {};
  op.kl = {};
  op.agree = {};
  op.kl_weight = {};
  run(stream_, op);
  EXPECT_CLOSE(c.ce, want.ce, 1e-6);
  EXPECT_CLOSE(c.d_student, want.d_student, 1e-6);
}

TEST_F(Distill, ATokenWithoutSuccessorHasNoCrossEntropy) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    const Case c = make(dtype, 6, 40);
    fill(c.ce_weight, [](std::int64_t t) { return t % 2 == 0 ? 0.0 : 0.7; });
    run(stream_, c.op(1.0));
    const std::vector<double> all = to_doubles(c.ce);
    const Tensor d_all = copy_as(memory_, dtype, c.d_student);
    for (const std::int64_t t : {0, 2, 4}) {
      c.next.as<std::int32_t>()[t] = -1;
    }
    run(stream_, c.op(1.0));
    for (std::int64_t t = 0; t < 6; ++t) {
      EXPECT_EQ(c.ce.as<double>()[t], t % 2 == 0 ? 0.0 : all[static_cast<std::size_t>(t)]);
    }
    EXPECT_SAME_BITS(c.d_student, d_all);
  }
}

TEST_F(Distill, RefusesIdsOutsideTheVocabularyAndMissingArguments) {
  const Case c = make(DType::f32, 4, 10);
  c.next.as<std::int32_t>()[2] = 10;
  EXPECT_THROW(run(stream_, c.op(1.0)), Error);
  DistillLoss without_ce = c.op(1.0);
  without_ce.ce = {};
  EXPECT_NO_THROW(run(stream_, without_ce));  // row 2 has no weight
  DistillLoss without_next = c.op(1.0);
  without_next.next = {};
  EXPECT_THROW(run(stream_, without_next), Error);
  DistillLoss without_teacher = c.op(1.0);
  without_teacher.teacher = {};
  EXPECT_THROW(run(stream_, without_teacher), Error);
  DistillLoss without_weight = without_ce;
  without_weight.kl_weight = {};
  EXPECT_THROW(run(stream_, without_weight), Error);
  DistillLoss cold = without_ce;
  cold.temperature = 0.0;
  EXPECT_THROW(run(stream_, cold), Error);
}

class Align : public OpTest {};

TEST_F(Align, SumsAndGradientMatchDefinition) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const std::int64_t tokens : {0, 1, 31, 200}) {
      const Shape shape{tokens, 3, 7};
      const Tensor student = normal(dtype, shape, 1);
      const Tensor teacher = normal(dtype, shape, 2);
      const Tensor keep = memory_.empty(Region::loss, DType::u8, {tokens});
      fill(keep, [](std::int64_t t) { return t % 3 == 1 ? 0.0 : 1.0; });
      const Tensor d_student = empty(dtype, shape);
      const Tensor sums = tensor_of<double>(memory_, {1.0, 2.0});
      run(stream_, AlignLoss{d_student, sums, student, teacher, keep});
      const auto s = to_doubles(student);
      const auto r = to_doubles(teacher);
      std::vector<double> want = {1.0, 2.0};
      std::vector<double> gradient(s.size(), 0.0);
      for (std::size_t i = 0; i < s.size(); ++i) {
        if (i / 21 % 3 != 1) {
          want[0] += (s[i] - r[i]) * (s[i] - r[i]);
          want[1] += r[i] * r[i];
          gradient[i] = 2.0 * (s[i] - r[i]);
        }
      }
      EXPECT_CLOSE(sums, want, dtype == DType::f32 ? 1e-7 : 1e-14);
      EXPECT_CLOSE(d_student, gradient, dtype == DType::f32 ? 1e-7 : 1e-15);
      const Tensor again = tensor_of<double>(memory_, {1.0, 2.0});
      with_threads(3, [&] { run(stream_, AlignLoss{{}, again, student, teacher, keep}); });
      EXPECT_SAME_BITS(again, sums);
    }
  }
}

TEST_F(Align, GradientMatchesFiniteDifferences) {
  const Shape shape{5, 2, 3};
  const Tensor student = normal(DType::f64, shape, 1);
  const Tensor teacher = normal(DType::f64, shape, 2);
  const Tensor keep = tensor_of<std::uint8_t>(memory_, {1, 0, 1, 1, 0});
  const Tensor d_student = empty(DType::f64, shape);
  const Tensor sums = zeros(DType::f64, {2});
  run(stream_, AlignLoss{d_student, sums, student, teacher, keep});
  EXPECT_GRADIENT(student, d_student, [&] {
    fill(sums, [](std::int64_t) { return 0.0; });
    run(stream_, AlignLoss{{}, sums, student, teacher, keep});
    return sums.as<double>()[0];
  });
}

TEST_F(Align, RefusesWrongShapes) {
  const Tensor x = normal(DType::f32, {4, 2, 3}, 1);
  const Tensor sums = zeros(DType::f64, {2});
  const Tensor keep = tensor_of<std::uint8_t>(memory_, {1, 1, 1});
  EXPECT_THROW(run(stream_, AlignLoss{{}, sums, x, x, keep}), Error);
}

}  // namespace

}  // namespace bifocal::test
