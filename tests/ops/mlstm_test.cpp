// The chunkwise mLSTM against its definition: forward, properties of the read, generation's step.
#include "ops/mlstm.h"

#include <limits>

#include <omp.h>

#include "ops/mlstm_case.h"

namespace bifocal::test {

namespace {

struct Problem {
  MlstmShape shape;
  std::vector<std::int64_t> documents;
};

// Documents of 0, 1, chunk - 1, chunk, chunk + 1 and many chunks; every sharing of heads.
std::vector<Problem> problems() {
  return {
      {{.heads = 1, .states = 1, .v_heads = 1, .head_dim = 1}, {1}},
      {{.heads = 4, .states = 1, .v_heads = 1, .head_dim = 8}, {1, 63, 64, 65}},
      {{.heads = 4, .states = 2, .v_heads = 2, .head_dim = 5}, {64, 128}},
      {{.heads = 4, .states = 4, .v_heads = 1, .head_dim = 16}, {3, 1, 1, 130, 2}},
      {{.heads = 4, .states = 4, .v_heads = 2, .head_dim = 7}, {127, 1, 64}},
      {{.heads = 6, .states = 2, .v_heads = 1, .head_dim = 4}, {700, 3, 129, 64}},
      {{.heads = 3, .states = 3, .v_heads = 3, .head_dim = 33}, {100}},
      {{.heads = 2, .states = 2, .v_heads = 1, .head_dim = 3}, {}},
  };
}

TEST(Mlstm, ChunkwiseMatchesTheDefinitionInDouble) {
  for (const Problem& problem : problems()) {
    for (const auto start : {MlstmStart::fresh, MlstmStart::carried}) {
      const MlstmCase test(problem.shape, problem.documents, start);
      // Sums of under 1000 terms whose weights are positive: a few hundred units in the last place.
      expect_close(test.forward(MlstmPath::chunkwise), test.forward(MlstmPath::definition), 1e-13);
    }
  }
}

TEST(Mlstm, ChunkwiseMatchesTheDefinitionInFloat) {
  for (const Problem& problem : problems()) {
    for (const auto start : {MlstmStart::fresh, MlstmStart::carried}) {
      const MlstmCase test(problem.shape, problem.documents, start);
      // Weighted means of values by positive weights: errors stay at some units in the last place
      // (6e-8) however many tokens the mean runs over.
      expect_close(test.rounded(DType::f32).forward(MlstmPath::chunkwise),
                   test.rounded(DType::f64).forward(MlstmPath::definition),
                   2e-6);
    }
  }
}

TEST(Mlstm, ExtremeGatesStayFiniteAndRight) {
  for (const double forget : {-40.0, -8.0, 8.0, 40.0}) {
    for (const double input : {-40.0, 40.0}) {
      MlstmCase test({}, {70, 1, 150}, MlstmStart::carried);
      // Signs alternate at different periods, so that all four combinations meet.
      fill(test.f_gate, [&](std::int64_t i) { return i % 14 < 10 ? forget : -forget; });
      fill(test.i_gate, [&](std::int64_t i) { return i % 6 < 4 ? input : -input; });
      const MlstmOutputs want = test.rounded(DType::f64).forward(MlstmPath::definition);
      expect_close(test.rounded(DType::f64).forward(MlstmPath::chunkwise), want, 1e-12);
      expect_close(test.rounded(DType::f32).forward(MlstmPath::chunkwise), want, 1e-5);
    }
  }
}

TEST(Mlstm, AConstantAddedToTheInputGateCancels) {
  MlstmCase test({}, {90, 64, 7}, MlstmStart::fresh);
  const MlstmOutputs want = test.forward(MlstmPath::chunkwise);
  double* i_gate = test.i_gate.as<double>();
  std::transform(i_gate, i_gate + test.i_gate.size(), i_gate, [](double x) { return x + 37.5; });
  // Gate sums of up to 100 are rounded at 1e-14.
  EXPECT_CLOSE(test.forward(MlstmPath::chunkwise).h, want.h, 1e-12);
}

TEST(Mlstm, ADocumentMovesNoBitOfAnother) {
  MlstmCase test({}, {70, 61, 64}, MlstmStart::fresh);
  const MlstmOutputs h = test.forward(MlstmPath::chunkwise);
  const MlstmGradients gradients = test.backward(MlstmPath::chunkwise, h.h);
  for (Tensor* changed : {&test.q, &test.k, &test.v, &test.i_gate, &test.f_gate, &test.d_h}) {
    const TensorView middle = changed->rows(70, 131);
    fill(middle, [](std::int64_t i) { return 3.0 + static_cast<double>(i % 5); });
  }
  const MlstmOutputs h_changed = test.forward(MlstmPath::chunkwise);
  const MlstmGradients changed = test.backward(MlstmPath::chunkwise, h_changed.h);
  const auto same = [](const Tensor& a, const Tensor& b) {
    EXPECT_SAME_BITS(a.rows(0, 70), b.rows(0, 70));
    EXPECT_SAME_BITS(a.rows(131, 195), b.rows(131, 195));
  };
  same(h_changed.h, h.h);
  same(changed.q, gradients.q);
  same(changed.k, gradients.k);
  same(changed.v, gradients.v);
  same(changed.i_gate, gradients.i_gate);
  same(changed.f_gate, gradients.f_gate);
}

TEST(Mlstm, BitsDoNotDependOnTheNumberOfThreads) {
  const MlstmCase test = MlstmCase({}, {700, 61, 64}, MlstmStart::carried).rounded(DType::f32);
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const MlstmOutputs one = test.forward(MlstmPath::chunkwise);
  const MlstmGradients one_back = test.backward(MlstmPath::chunkwise, one.h);
  omp_set_num_threads(3);
  const MlstmOutputs three = test.forward(MlstmPath::chunkwise);
  const MlstmGradients three_back = test.backward(MlstmPath::chunkwise, three.h);
  omp_set_num_threads(threads);
  EXPECT_SAME_BITS(three.h, one.h);
  EXPECT_SAME_BITS(three.c, one.c);
  EXPECT_SAME_BITS(three_back.q, one_back.q);
  EXPECT_SAME_BITS(three_back.k, one_back.k);
  EXPECT_SAME_BITS(three_back.v, one_back.v);
  EXPECT_SAME_BITS(three_back.f_gate, one_back.f_gate);
  EXPECT_SAME_BITS(three_back.c, one_back.c);
}

TEST(Mlstm, AnEmptyRowPassesItsStateThrough) {
  const MlstmCase test({}, {}, MlstmStart::carried);
  const MlstmOutputs out = test.forward(MlstmPath::chunkwise);
  EXPECT_SAME_BITS(out.c, test.c);
  EXPECT_SAME_BITS(out.n, test.n);
  EXPECT_SAME_BITS(out.m, test.m);
  const MlstmGradients gradients = test.backward(MlstmPath::chunkwise, out.h);
  EXPECT_SAME_BITS(gradients.c, test.d_final_c);
  EXPECT_SAME_BITS(gradients.n, test.d_final_n);
}

TEST(Mlstm, AFreshRowOfNoTokensLeavesTheEmptyState) {
  const MlstmCase test({}, {}, MlstmStart::fresh);
  const MlstmOutputs out = test.forward(MlstmPath::chunkwise);
  EXPECT_WITHIN(out.c, std::vector<double>(static_cast<std::size_t>(out.c.size()), 0.0), 0.0);
  EXPECT_WITHIN(out.m, std::vector<double>(2, -std::numeric_limits<double>::infinity()), 0.0);
}

// Two of three sequences, in another order than their states, a token at a time.
void compare_steps(DType dtype, double bound) {
  const MlstmShape s{.heads = 4, .states = 4, .v_heads = 2, .head_dim = 6};
  constexpr std::int64_t kTokens = 150;
  const std::vector<std::int32_t> order = {2, 0};
  std::vector<MlstmCase> cases;
  for (const std::uint64_t seed : {1, 2, 3}) {
    cases.push_back(MlstmCase(s, {kTokens}, MlstmStart::carried, seed).rounded(dtype));
  }
  const auto held = static_cast<std::int64_t>(cases.size());
  const auto rows = static_cast<std::int64_t>(order.size());
  Memory memory;
  const Tensor c = empty(memory, dtype, {held, s.states, s.head_dim, s.head_dim});
  const Tensor n = empty(memory, dtype, {held, s.states, s.head_dim});
  const Tensor m = empty(memory, dtype, {held, s.states});
  const Tensor q = empty(memory, dtype, {rows, s.heads, s.head_dim});
  const Tensor h = empty(memory, dtype, {rows, s.heads, s.head_dim});
  const Tensor k = empty(memory, dtype, {rows, s.states, s.head_dim});
  const Tensor v = empty(memory, dtype, {rows, s.v_heads, s.head_dim});
  const Tensor i_gate = empty(memory, dtype, {rows, s.states});
  const Tensor f_gate = empty(memory, dtype, {rows, s.states});
  const Tensor sequences = tensor_of<std::int32_t>(memory, order);
  const auto copy = [](const TensorView& to, const ConstTensorView& from) {
    std::memcpy(to.data, from.data, to.bytes());
  };
  std::vector<MlstmOutputs> want;
  for (std::int64_t b = 0; b < held; ++b) {
    const MlstmCase& test = cases[static_cast<std::size_t>(b)];
    copy(c.rows(b, b + 1), test.c);
    copy(n.rows(b, b + 1), test.n);
    copy(m.rows(b, b + 1), test.m);
    want.push_back(test.forward(MlstmPath::chunkwise));
  }
  CpuStream stream;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t row = 0; row < rows; ++row) {
      const MlstmCase& test = cases[static_cast<std::size_t>(order[static_cast<std::size_t>(row)])];
      copy(q.rows(row, row + 1), test.q.rows(t, t + 1));
      copy(k.rows(row, row + 1), test.k.rows(t, t + 1));
      copy(v.rows(row, row + 1), test.v.rows(t, t + 1));
      copy(i_gate.rows(row, row + 1), test.i_gate.rows(t, t + 1));
      copy(f_gate.rows(row, row + 1), test.f_gate.rows(t, t + 1));
    }
    const MlstmStep op{.h = h,
                       .c = c,
                       .n = n,
                       .m = m,
                       .q = q,
                       .k = k,
                       .v = v,
                       .i_gate = i_gate,
                       .f_gate = f_gate,
                       .sequences = sequences};
    op.check();
    run(stream, op);
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto sequence = static_cast<std::size_t>(order[static_cast<std::size_t>(row)]);
      EXPECT_CLOSE(h.rows(row, row + 1), want[sequence].h.rows(t, t + 1), bound);
    }
  }
  for (const std::int64_t b : {0, 2}) {
    EXPECT_CLOSE(c.rows(b, b + 1), want[static_cast<std::size_t>(b)].c, bound);
    EXPECT_CLOSE(n.rows(b, b + 1), want[static_cast<std::size_t>(b)].n, bound);
    EXPECT_CLOSE(m.rows(b, b + 1), want[static_cast<std::size_t>(b)].m, bound);
  }
  EXPECT_SAME_BITS(c.rows(1, 2).reshape(cases[1].c.shape()), cases[1].c);
  EXPECT_SAME_BITS(m.rows(1, 2).reshape(cases[1].m.shape()), cases[1].m);
}

TEST(Mlstm, StepsTokenByTokenMatchTheWholeRow) {
  compare_steps(DType::f64, 1e-13);
  // The state is rounded once per token; errors fade with the state, at some 6e-8 each.
  compare_steps(DType::f32, 5e-6);
}

TEST(Mlstm, RefusesHeadsThatDoNotShareStatesEvenly) {
  Memory memory;
  MlstmCase test({}, {5}, MlstmStart::fresh);
  MlstmOutputs out = test.empty_outputs();
  MlstmForward op{.h = out.h, .final = {}, .inputs = test.inputs()};
  const Tensor three = empty(memory, DType::f64, {5, 3, 5});
  op.inputs.q = three;
  EXPECT_THROW(op.check(), Error);
  op.inputs = test.inputs();
  op.inputs.i_gate = op.inputs.i_gate.rows(0, 4);
  EXPECT_THROW(op.check(), Error);
}

}  // namespace

}  // namespace bifocal::test
