// Gradients of the mLSTM: definition against finite differences, training path against definition.
#include "ops/mlstm_case.h"
#include "support/gradient_check.h"

namespace bifocal::test {

namespace {

// sum d_h h + sum d_final_c C + sum d_final_n n, the final state at the scale that m had at first:
// m takes no gradient, so the scale must not move with the inputs.
class Loss {
 public:
  Loss(const MlstmCase& test, const MlstmOutputs& at) : test_(test), m_(to_doubles(at.m)) {}

  double operator()() const {
    const MlstmOutputs out = test_.forward(MlstmPath::definition);
    double sum = weighted_sum(out.h, test_.d_h);
    for (std::int64_t state = 0; state < test_.shape().states; ++state) {
      const double scale =
          std::exp(out.m.as<double>()[state] - m_[static_cast<std::size_t>(state)]);
      sum += scale *
             (weighted_sum(out.c.rows(state, state + 1), test_.d_final_c.rows(state, state + 1)) +
              weighted_sum(out.n.rows(state, state + 1), test_.d_final_n.rows(state, state + 1)));
    }
    return sum;
  }

 private:
  const MlstmCase& test_;
  std::vector<double> m_;
};

void check_finite_differences(const MlstmCase& test) {
  const MlstmOutputs out = test.forward(MlstmPath::definition);
  const Loss loss(test, out);
  for (const auto path : {MlstmPath::definition, MlstmPath::chunkwise}) {
    const MlstmGradients gradients = test.backward(path, out.h);
    EXPECT_GRADIENT(test.q, gradients.q, loss);
    EXPECT_GRADIENT(test.k, gradients.k, loss);
    EXPECT_GRADIENT(test.v, gradients.v, loss);
    EXPECT_GRADIENT(test.i_gate, gradients.i_gate, loss);
    EXPECT_GRADIENT(test.f_gate, gradients.f_gate, loss);
    if (test.c) {
      EXPECT_GRADIENT(test.c, gradients.c, loss);
      EXPECT_GRADIENT(test.n, gradients.n, loss);
    }
  }
}

TEST(MlstmGradient, MatchesFiniteDifferencesWithStatesOnBothSides) {
  check_finite_differences(
      {{.heads = 4, .states = 2, .v_heads = 1, .head_dim = 3}, {75}, MlstmStart::carried});
}

TEST(MlstmGradient, MatchesFiniteDifferencesAcrossDocuments) {
  check_finite_differences(
      {{.heads = 4, .states = 4, .v_heads = 2, .head_dim = 3}, {9, 1, 66}, MlstmStart::carried});
  check_finite_differences(
      {{.heads = 2, .states = 1, .v_heads = 1, .head_dim = 4}, {64, 2}, MlstmStart::fresh});
}

struct Problem {
  MlstmShape shape;
  std::vector<std::int64_t> documents;
};

std::vector<Problem> problems() {
  return {
      {{.heads = 1, .states = 1, .v_heads = 1, .head_dim = 1}, {1}},
      {{.heads = 4, .states = 1, .v_heads = 1, .head_dim = 8}, {1, 63, 64, 65}},
      {{.heads = 4, .states = 2, .v_heads = 2, .head_dim = 5}, {64, 128}},
      {{.heads = 4, .states = 4, .v_heads = 1, .head_dim = 16}, {3, 1, 1, 130, 2}},
      {{.heads = 6, .states = 2, .v_heads = 1, .head_dim = 4}, {600, 3, 129}},
      {{.heads = 2, .states = 2, .v_heads = 1, .head_dim = 3}, {}},
  };
}

TEST(MlstmGradient, ChunkwiseMatchesTheDefinition) {
  for (const Problem& problem : problems()) {
    for (const auto start : {MlstmStart::fresh, MlstmStart::carried}) {
      const MlstmCase test(problem.shape, problem.documents, start);
      const MlstmOutputs out = test.forward(MlstmPath::definition);
      expect_close(test.backward(MlstmPath::chunkwise, out.h),
                   test.backward(MlstmPath::definition, out.h),
                   1e-12);
      const MlstmCase exact = test.rounded(DType::f64);
      const MlstmCase single = test.rounded(DType::f32);
      const MlstmOutputs h = single.forward(MlstmPath::chunkwise);
      const MlstmOutputs exact_h = exact.forward(MlstmPath::definition);
      // Differences v_j - h_t of numbers near each other lose some digits of float's seven.
      expect_close(single.backward(MlstmPath::chunkwise, h.h),
                   exact.backward(MlstmPath::definition, exact_h.h),
                   2e-5);
    }
  }
}

// The state fades within a token or hardly at all, and a final state's gradient enters. Where it
// fades, gradients of the forget gates are smaller than the terms q . d_q and k . d_k by e^-8.
TEST(MlstmGradient, ForgetGatesKeepTheirDigitsUnderStrongAndWeakDecay) {
  for (const double forget : {-8.0, 8.0}) {
    MlstmCase test({}, {70, 1, 150}, MlstmStart::carried);
    fill_normal(test.f_gate, 5, 0.1, forget);
    const MlstmCase exact = test.rounded(DType::f64);
    const MlstmCase single = test.rounded(DType::f32);
    const MlstmOutputs h = single.forward(MlstmPath::chunkwise);
    const MlstmOutputs exact_h = exact.forward(MlstmPath::definition);
    const MlstmGradients got = single.backward(MlstmPath::chunkwise, h.h);
    const MlstmGradients want = exact.backward(MlstmPath::definition, exact_h.h);
    // With little before a token, h_t is nearly v_t, and v_t - h_t keeps two digits less.
    expect_close(got, want, 5e-5);
    EXPECT_CLOSE(got.f_gate, want.f_gate, 5e-5);
  }
}

TEST(MlstmGradient, ExtremeGatesStayFiniteAndRight) {
  for (const double forget : {-40.0, 40.0}) {
    for (const double input : {-40.0, 40.0}) {
      MlstmCase test({}, {70, 1, 150}, MlstmStart::carried);
      fill(test.f_gate, [&](std::int64_t i) { return i % 14 < 10 ? forget : -forget; });
      fill(test.i_gate, [&](std::int64_t i) { return i % 6 < 4 ? input : -input; });
      const MlstmCase exact = test.rounded(DType::f64);
      const MlstmCase single = test.rounded(DType::f32);
      const MlstmOutputs h = single.forward(MlstmPath::chunkwise);
      const MlstmOutputs exact_h = exact.forward(MlstmPath::definition);
      const MlstmGradients want = exact.backward(MlstmPath::definition, exact_h.h);
      expect_close(exact.backward(MlstmPath::chunkwise, exact_h.h), want, 1e-11);
      // Exponents reach 80 and more, so float weights near the cut carry errors of 80 * 6e-8.
      expect_close(single.backward(MlstmPath::chunkwise, h.h), want, 1e-4);
    }
  }
}

TEST(MlstmGradient, ADocumentsFirstForgetGateTakesNone) {
  const MlstmCase test({}, {70, 61, 64}, MlstmStart::fresh);
  const MlstmOutputs out = test.forward(MlstmPath::chunkwise);
  const MlstmGradients gradients = test.backward(MlstmPath::chunkwise, out.h);
  for (const std::int64_t t : {0, 70, 131}) {
    EXPECT_WITHIN(gradients.f_gate.rows(t, t + 1), std::vector<double>(2, 0.0), 0.0);
  }
}

TEST(MlstmGradient, RefusesTheGradientOfAnAbsentState) {
  MlstmCase test({}, {5}, MlstmStart::fresh);
  const MlstmOutputs out = test.forward(MlstmPath::chunkwise);
  const MlstmGradients gradients = test.empty_gradients();
  const MlstmBackward op{.d_q = gradients.q,
                         .d_k = gradients.k,
                         .d_v = gradients.v,
                         .d_i_gate = gradients.i_gate,
                         .d_f_gate = gradients.f_gate,
                         .d_initial_c = gradients.c,
                         .d_initial_n = gradients.n,
                         .d_h = test.d_h,
                         .h = out.h,
                         .d_final_c = {},
                         .d_final_n = {},
                         .inputs = test.inputs()};
  EXPECT_THROW(op.check(), Error);
}

}  // namespace

}  // namespace bifocal::test
