// Rows cut into shards: summaries, folds and the shards' own passes against the whole row.
#include <limits>

#include "ops/mlstm_case.h"

namespace bifocal::test {

namespace {

using Cuts = std::vector<std::int64_t>;  // shard r holds tokens [cuts[r], cuts[r + 1])

class Shards {
 public:
  Shards(const MlstmCase& test, const Cuts& cuts) : test_(test), cuts_(cuts) {}

  std::int64_t count() const { return static_cast<std::int64_t>(cuts_.size()) - 1; }

  std::int64_t begin(std::int64_t shard) const { return cuts_[static_cast<std::size_t>(shard)]; }

  std::int64_t end(std::int64_t shard) const { return begin(shard + 1); }

  MlstmInputs inputs(std::int64_t shard) const {
    const MlstmOutputs& state = states_[static_cast<std::size_t>(shard)];
    return test_.shard(begin(shard), end(shard), state.final());
  }

  // Summaries of all shards, the state before each, and the whole row's results.
  MlstmOutputs forward() {
    const MlstmShape& s = test_.shape();
    const Tensor all =
        empty(test_.memory(), test_.dtype(), {count(), mlstm_summary_size(s.states, s.head_dim)});
    for (std::int64_t shard = 0; shard < count(); ++shard) {
      MlstmInputs in = test_.shard(begin(shard), end(shard), {});
      in.q = {};
      call(MlstmSummarise{.summary = row(all, shard), .inputs = in});
    }
    MlstmOutputs whole = test_.empty_outputs();
    for (std::int64_t shard = 0; shard < count(); ++shard) {
      states_.push_back(test_.empty_outputs());
      call(MlstmFold{.state = states_.back().final(), .summaries = all.rows(0, shard)});
      call(MlstmForward{.h = whole.h.rows(begin(shard), end(shard)),
                        .final = whole.final(),
                        .inputs = inputs(shard)});
    }
    return whole;
  }

  MlstmGradients backward(const Tensor& h) {
    const MlstmShape& s = test_.shape();
    const Tensor all = empty(test_.memory(),
                             test_.dtype(),
                             {count(), mlstm_gradient_summary_size(s.states, s.head_dim)});
    for (std::int64_t shard = 0; shard < count(); ++shard) {
      call(MlstmGradientSummarise{.summary = row(all, shard),
                                  .d_h = test_.d_h.rows(begin(shard), end(shard)),
                                  .h = h.rows(begin(shard), end(shard)),
                                  .inputs = inputs(shard)});
    }
    MlstmGradients whole = test_.empty_gradients();
    const MlstmGradients final = test_.empty_gradients();
    for (std::int64_t shard = 0; shard < count(); ++shard) {
      const auto part = [&](const Tensor& x) { return x.rows(begin(shard), end(shard)); };
      call(MlstmGradientFold{
          .d_c = final.c, .d_n = final.n, .summaries = all.rows(shard + 1, count())});
      call(MlstmBackward{.d_q = part(whole.q),
                         .d_k = part(whole.k),
                         .d_v = part(whole.v),
                         .d_i_gate = part(whole.i_gate),
                         .d_f_gate = part(whole.f_gate),
                         .d_initial_c = whole.c,
                         .d_initial_n = whole.n,
                         .d_h = part(test_.d_h),
                         .h = part(h),
                         .d_final_c = final.c,
                         .d_final_n = final.n,
                         .inputs = inputs(shard)});
    }
    whole.c = {};
    whole.n = {};
    return whole;
  }

 private:
  template <class Op>
  static void call(const Op& op) {
    op.check();
    CpuStream stream;
    run(stream, op);
  }

  static TensorView row(const Tensor& all, std::int64_t shard) {
    return all.rows(shard, shard + 1).reshape({all.shape()[1]});
  }

  const MlstmCase& test_;
  Cuts cuts_;
  std::vector<MlstmOutputs> states_;
};

// The whole row without a gradient of its final state: what training runs.
MlstmGradients whole_gradients(const MlstmCase& test, const Tensor& h) {
  MlstmGradients out = test.empty_gradients();
  mlstm_definition(MlstmBackward{.d_q = out.q,
                                 .d_k = out.k,
                                 .d_v = out.v,
                                 .d_i_gate = out.i_gate,
                                 .d_f_gate = out.f_gate,
                                 .d_initial_c = {},
                                 .d_initial_n = {},
                                 .d_h = test.d_h,
                                 .h = h,
                                 .d_final_c = {},
                                 .d_final_n = {},
                                 .inputs = test.inputs()});
  out.c = {};
  out.n = {};
  return out;
}

struct Problem {
  std::vector<std::int64_t> documents;
  Cuts cuts;
};

// 260 tokens: cuts at document starts, beside them, at chunk ends; shards of 0 and 1 tokens;
// documents over three shards and more; several documents in a shard.
std::vector<Problem> problems() {
  return {
      {{260}, {0, 64, 130, 131, 260}},
      {{260}, {0, 0, 87, 87, 173, 260, 260}},
      {{10, 200, 50}, {0, 10, 75, 140, 210, 260}},
      {{10, 200, 50}, {0, 11, 100, 209, 260}},
      {{1, 63, 64, 65, 67}, {0, 1, 65, 128, 194, 260}},
      {{20, 30, 25, 100, 85}, {0, 90, 91, 250, 260}},
      {{130, 130}, {0, 260}},
      {{130, 1, 129}, {0, 130, 130, 131, 260}},
  };
}

void compare(DType dtype, double bound) {
  const MlstmShape shapes[] = {{.heads = 4, .states = 2, .v_heads = 2, .head_dim = 5},
                               {.heads = 4, .states = 4, .v_heads = 2, .head_dim = 3}};
  for (const MlstmShape& shape : shapes) {
    for (const Problem& problem : problems()) {
      const MlstmCase test(shape, problem.documents, MlstmStart::fresh);
      const MlstmCase exact = test.rounded(DType::f64);
      const MlstmCase cut = test.rounded(dtype);
      const MlstmOutputs want = exact.forward(MlstmPath::definition);
      Shards shards(cut, problem.cuts);
      const MlstmOutputs got = shards.forward();
      expect_close(got, want, bound);
      expect_close(shards.backward(got.h), whole_gradients(exact, want.h), bound);
    }
  }
}

TEST(MlstmSummary, ShardsReproduceTheWholeRowInDouble) {
  compare(DType::f64, 1e-12);
}

TEST(MlstmSummary, ShardsReproduceTheWholeRowInFloat) {
  compare(DType::f32, 2e-5);
}

TEST(MlstmSummary, SlowDecayCarriesAcrossAllShards) {
  MlstmCase test({}, {10, 240, 10}, MlstmStart::fresh);
  fill_normal(test.f_gate, 3, 0.5, 8.0);
  const MlstmOutputs want = test.forward(MlstmPath::definition);
  Shards shards(test, {0, 30, 90, 91, 91, 200, 260});
  const MlstmOutputs got = shards.forward();
  expect_close(got, want, 1e-12);
  expect_close(shards.backward(got.h), whole_gradients(test, want.h), 1e-12);
}

TEST(MlstmSummary, ExtremeGatesCrossShards) {
  for (const double forget : {-40.0, 40.0}) {
    MlstmCase test({}, {10, 240, 10}, MlstmStart::fresh);
    fill(test.f_gate, [&](std::int64_t i) { return i % 14 < 10 ? forget : -forget; });
    fill(test.i_gate, [](std::int64_t i) { return i % 6 < 4 ? 40.0 : -40.0; });
    const MlstmOutputs want = test.forward(MlstmPath::definition);
    Shards shards(test, {0, 30, 90, 91, 91, 200, 260});
    const MlstmOutputs got = shards.forward();
    expect_close(got, want, 1e-11);
    expect_close(shards.backward(got.h), whole_gradients(test, want.h), 1e-11);
  }
}

TEST(MlstmSummary, AnEmptyShardIsTheNeutralSummary) {
  const MlstmCase test(
      {.heads = 1, .states = 1, .v_heads = 1, .head_dim = 2}, {}, MlstmStart::fresh);
  const Tensor summary = empty(test.memory(), DType::f64, {mlstm_summary_size(1, 2)});
  const MlstmSummarise op{.summary = summary, .inputs = test.inputs()};
  op.check();
  CpuStream stream;
  run(stream, op);
  const double minus_infinity = -std::numeric_limits<double>::infinity();
  EXPECT_WITHIN(summary, (std::vector<double>{0, 0, 0, 0, 0, 0, minus_infinity, 0}), 0.0);
}

}  // namespace

}  // namespace bifocal::test
