// Rows cut into shards on the device against the whole row's definition in double.
#include <gtest/gtest.h>

#include "cuda/mlstm_device.h"

namespace bifocal {
namespace {

using test::call;
using test::describe;
using test::DeviceMlstm;
using test::DeviceState;
using test::DeviceTensor;
using test::expect_near;
using test::MlstmCase;
using test::MlstmGradients;
using test::MlstmOutputs;
using test::MlstmPath;
using test::MlstmShape;
using test::MlstmStart;
using test::MlstmTypes;

using Cuts = std::vector<std::int64_t>;  // shard r holds tokens [cuts[r], cuts[r + 1])

struct Problem {
  std::vector<std::int64_t> documents;
  Cuts cuts;
};

// Cuts at document starts, beside them, at and off chunk ends; shards of 0 and 1 tokens; documents
// over three shards; several documents in a shard.
std::vector<Problem> problems() {
  return {{{200}, {0, 64, 130, 131, 200}},
          {{200}, {0, 0, 87, 87, 173, 200, 200}},
          {{10, 150, 40}, {0, 10, 75, 140, 160, 200}},
          {{10, 150, 40}, {0, 11, 100, 159, 200}},
          {{20, 30, 25, 60, 65}, {0, 90, 91, 190, 200}}};
}

double forward_bound(DType stored) {
  return stored == DType::bf16 ? 3.0 / 512.0 : 2e-6;
}

double backward_bound(DType stored) {
  return stored == DType::bf16 ? 8.0 / 512.0 : 4e-5;
}

class Shards {
 public:
  Shards(const DeviceMlstm& device, const Cuts& cuts) : device_(device), cuts_(cuts) {}

  void forward(CudaStream& stream, const DeviceTensor& h) {
    const MlstmShape& s = device_.shape;
    const DeviceTensor all(DType::f32, {count(), mlstm_summary_size(s.states, s.head_dim)}, 0);
    for (std::int64_t shard = 0; shard < count(); ++shard) {
      MlstmInputs in = device_.shard(begin(shard), begin(shard + 1), {});
      in.q = {};
      call(stream, MlstmSummarise{.summary = row(all, shard), .inputs = in});
    }
    for (std::int64_t shard = 0; shard < count(); ++shard) {
      states_.emplace_back(s, device_.types.shift);
      call(stream,
           MlstmFold{.state = states_.back().view(), .summaries = all.view().rows(0, shard)});
      call(stream,
           MlstmForward{.h = h.view().rows(begin(shard), begin(shard + 1)),
                        .final = {},
                        .inputs = inputs(shard)});
    }
  }

  void backward(CudaStream& stream, const DeviceTensor& h, const MlstmBackward& whole) const {
    const MlstmShape& s = device_.shape;
    const DeviceTensor all(
        DType::f32, {count(), mlstm_gradient_summary_size(s.states, s.head_dim)}, 0);
    for (std::int64_t shard = 0; shard < count(); ++shard) {
      call(stream,
           MlstmGradientSummarise{.summary = row(all, shard),
                                  .d_h = part(whole.d_h, shard),
                                  .h = part(h.view(), shard),
                                  .inputs = inputs(shard)});
    }
    const DeviceState final(s, 0);
    for (std::int64_t shard = 0; shard < count(); ++shard) {
      call(stream,
           MlstmGradientFold{.d_c = final.c.view(),
                             .d_n = final.n.view(),
                             .summaries = all.view().rows(shard + 1, count())});
      MlstmBackward op = whole;
      op.d_q = part(whole.d_q, shard);
      op.d_k = part(whole.d_k, shard);
      op.d_v = part(whole.d_v, shard);
      op.d_i_gate = part(whole.d_i_gate, shard);
      op.d_f_gate = part(whole.d_f_gate, shard);
      op.d_h = part(whole.d_h, shard);
      op.h = part(h.view(), shard);
      op.d_final_c = final.c.view();
      op.d_final_n = final.n.view();
      op.inputs = inputs(shard);
      call(stream, op);
    }
  }

 private:
  std::int64_t count() const { return static_cast<std::int64_t>(cuts_.size()) - 1; }

  std::int64_t begin(std::int64_t shard) const { return cuts_[static_cast<std::size_t>(shard)]; }

  template <class View>
  View part(const View& x, std::int64_t shard) const {
    return x.rows(begin(shard), begin(shard + 1));
  }

  MlstmInputs inputs(std::int64_t shard) const {
    return device_.shard(
        begin(shard), begin(shard + 1), states_[static_cast<std::size_t>(shard)].view());
  }

  static TensorView row(const DeviceTensor& all, std::int64_t shard) {
    return all.view().rows(shard, shard + 1).reshape({all.view().shape[1]});
  }

  const DeviceMlstm& device_;
  Cuts cuts_;
  std::vector<DeviceState> states_;
};

void check_shards(const MlstmCase& test, const Cuts& cuts, const MlstmTypes& types) {
  SCOPED_TRACE(describe(test, types));
  CudaStream stream;
  const DeviceMlstm device(test, types);
  Shards shards(device, cuts);
  const MlstmOutputs want = test.forward(MlstmPath::definition);
  const DeviceTensor h(types.stored, test.q.shape(), 0);
  shards.forward(stream, h);
  expect_near("h", h.download(stream), want.h, forward_bound(types.stored));

  test::round_to(types.stored, want.h);
  const MlstmGradients d = test.backward(MlstmPath::definition, want.h);
  const DeviceTensor kept = test::on_device(want.h, types.stored, 0);
  const DeviceTensor d_q(types.stored, test.q.shape(), 0);
  const DeviceTensor d_k(types.stored, test.k.shape(), 0);
  const DeviceTensor d_v(types.stored, test.v.shape(), 0);
  const DeviceTensor d_i(types.gates, test.i_gate.shape(), 0);
  const DeviceTensor d_f(types.gates, test.f_gate.shape(), 0);
  shards.backward(stream,
                  kept,
                  {.d_q = d_q.view(),
                   .d_k = d_k.view(),
                   .d_v = d_v.view(),
                   .d_i_gate = d_i.view(),
                   .d_f_gate = d_f.view(),
                   .d_initial_c = {},
                   .d_initial_n = {},
                   .d_h = device.d_h.view(),
                   .h = {},
                   .d_final_c = {},
                   .d_final_n = {},
                   .inputs = {}});
  const double bound = backward_bound(types.stored);
  expect_near("d_q", d_q.download(stream), d.q, bound);
  expect_near("d_k", d_k.download(stream), d.k, bound);
  expect_near("d_v", d_v.download(stream), d.v, bound);
  expect_near("d_i_gate", d_i.download(stream), d.i_gate, bound);
  expect_near("d_f_gate", d_f.download(stream), d.f_gate, bound);
}

TEST(CudaMlstmSummary, ShardsMatchTheWholeRow) {
  for (const MlstmShape& shape :
       {MlstmShape{.heads = 4, .states = 2, .v_heads = 2, .head_dim = 6},
        MlstmShape{.heads = 2, .states = 2, .v_heads = 1, .head_dim = 64}}) {
    for (const Problem& problem : problems()) {
      for (const MlstmTypes& types : test::mlstm_types()) {
        MlstmCase test(shape, problem.documents, MlstmStart::fresh);
        test::fill(test.d_final_c, [](std::int64_t) { return 0.0; });
        test::fill(test.d_final_n, [](std::int64_t) { return 0.0; });
        test::round_inputs(test, types);
        check_shards(test, problem.cuts, types);
      }
    }
  }
}

TEST(CudaMlstmSummary, NoShardsGiveTheEmptyState) {
  CudaStream stream;
  const MlstmShape shape{.heads = 2, .states = 2, .v_heads = 1, .head_dim = 8};
  const DeviceState state(shape, 0);
  const DeviceTensor none(DType::f32, {0, mlstm_summary_size(2, 8)}, 0);
  call(stream, MlstmFold{.state = state.view(), .summaries = none.view()});
  EXPECT_EQ(state.c.download(stream), std::vector<double>(2 * 8 * 8, 0.0));
  EXPECT_EQ(state.n.download(stream), std::vector<double>(2 * 8, 0.0));
  EXPECT_EQ(state.m.download(stream),
            std::vector<double>(2, -std::numeric_limits<double>::infinity()));
}

}  // namespace
}  // namespace bifocal
