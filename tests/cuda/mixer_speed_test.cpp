// Times of attention, the mLSTM and feature maps at the shape of Qwen3-4B in bfloat16.
#include <algorithm>
#include <string>
#include <vector>

#include "cuda/mlstm_stages.h"
#include "cuda/speed.h"
#include "ops/feature_map.h"
#include "ops/mlstm.h"
#include "ops/sliding_attention.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::kSpeedHeadDim;
using test::kSpeedHeads;
using test::kSpeedKvHeads;
using test::kSpeedTokens;
using test::numbers_on_device;
using test::speed_tensor;

class CudaMixerSpeed : public test::CudaSpeed {};

const Shape kQueries{kSpeedTokens, kSpeedHeads, kSpeedHeadDim};
const Shape kKeys{kSpeedTokens, kSpeedKvHeads, kSpeedHeadDim};

double bytes_of(std::initializer_list<const DeviceTensor*> tensors) {
  double sum = 0.0;
  for (const DeviceTensor* tensor : tensors) {
    sum += static_cast<double>(tensor->view().bytes());
  }
  return sum;
}

// Key ranges of a row of documents of `document` tokens with windows of `window`.
std::vector<std::int32_t> key_begins(std::int64_t window, std::int64_t document) {
  std::vector<std::int32_t> begins;
  for (std::int64_t t = 0; t < kSpeedTokens; ++t) {
    begins.push_back(static_cast<std::int32_t>(std::max(t / document * document, t - window + 1)));
  }
  return begins;
}

// FLOP of the two products of the forward pass over the pairs that see each other.
double attention_flop(const std::vector<std::int32_t>& begins) {
  double pairs = 0.0;
  for (std::size_t t = 0; t < begins.size(); ++t) {
    pairs += static_cast<double>(t) + 1.0 - begins[t];
  }
  return 4.0 * pairs * kSpeedHeads * kSpeedHeadDim;
}

TEST_F(CudaMixerSpeed, SlidingAttention) {
  struct Case {
    const char* name;
    std::int64_t window, document;
    bool sink, backward;
  };

  const DeviceTensor q = speed_tensor(DType::bf16, kQueries, 1);
  const DeviceTensor k = speed_tensor(DType::bf16, kKeys, 2);
  const DeviceTensor v = speed_tensor(DType::bf16, kKeys, 3);
  const DeviceTensor sink = speed_tensor(DType::bf16, {kSpeedHeads}, 4);
  const DeviceTensor d_out = speed_tensor(DType::bf16, kQueries, 5);
  const DeviceTensor out(DType::bf16, kQueries, 0);
  const DeviceTensor lse(DType::f32, {kSpeedTokens, kSpeedHeads}, 0);
  const DeviceTensor d_q(DType::bf16, kQueries, 0);
  const DeviceTensor d_k(DType::bf16, kKeys, 0);
  const DeviceTensor d_v(DType::bf16, kKeys, 0);
  const DeviceTensor d_sink = speed_tensor(DType::f32, {kSpeedHeads}, 6);
  const double forward_bytes = bytes_of({&q, &k, &v, &out, &lse});
  const double backward_bytes = bytes_of({&q, &k, &v, &out, &lse, &d_out, &d_q, &d_k, &d_v});
  for (const Case& c : {Case{"448 + sink", 448, kSpeedTokens, true, true},
                        Case{"448", 448, kSpeedTokens, false, true},
                        Case{"576", 576, kSpeedTokens, false, true},
                        Case{"64", 64, kSpeedTokens, false, true},
                        Case{"448 + sink, documents of 4,096", 448, 4096, true, true},
                        Case{"full, documents of 4,096", kSpeedTokens, 4096, false, false},
                        Case{"full", kSpeedTokens, kSpeedTokens, false, false}}) {
    const std::vector<std::int32_t> begins = key_begins(c.window, c.document);
    const DeviceTensor key_begin = numbers_on_device(begins);
    AttentionInputs inputs{q.view(), k.view(), v.view(), key_begin.view(), {}, {}, {}, {}, {}};
    SlidingAttentionBackward backward{.d_q = d_q.view(),
                                      .d_k = d_k.view(),
                                      .d_v = d_v.view(),
                                      .d_sink = {},
                                      .d_pinned_k = {},
                                      .d_pinned_v = {},
                                      .d_out = d_out.view(),
                                      .out = out.view(),
                                      .lse = lse.view(),
                                      .inputs = {}};
    if (c.sink) {
      inputs.sink = sink.view();
      backward.d_sink = d_sink.view();
    }
    backward.inputs = inputs;
    const double flop = attention_flop(begins);
    measure_op(fmt::format("attention {} forward", c.name),
               forward_bytes,
               flop,
               SlidingAttentionForward{out.view(), lse.view(), inputs});
    if (c.backward) {
      measure_op(
          fmt::format("attention {} backward", c.name), backward_bytes, 2.5 * flop, backward);
    }
  }
}

// Features, keys for each of `states`, values and gates; documents of `document` tokens.
struct MlstmTensors {
  DeviceTensor q, k, v, i_gate, f_gate, starts;

  MlstmTensors(std::int64_t states, std::int64_t document)
      : q(speed_tensor(DType::bf16, kQueries, 11, 0.01, 0.0, true)),
        k(speed_tensor(DType::bf16, {kSpeedTokens, states, kSpeedHeadDim}, 12, 0.01, 0.0, true)),
        v(speed_tensor(DType::bf16, kKeys, 13)),
        i_gate(speed_tensor(DType::f32, {kSpeedTokens, states}, 14)),
        f_gate(speed_tensor(DType::f32, {kSpeedTokens, states}, 15, 1.0, 4.0)),
        starts(start_flags(document)) {}

  static DeviceTensor start_flags(std::int64_t document) {
    std::vector<std::uint8_t> flags;
    for (std::int64_t t = 0; t < kSpeedTokens; ++t) {
      flags.push_back(t % document == 0 ? 1 : 0);
    }
    return numbers_on_device(flags);
  }

  MlstmInputs inputs() const {
    return {.q = q.view(),
            .k = k.view(),
            .v = v.view(),
            .i_gate = i_gate.view(),
            .f_gate = f_gate.view(),
            .starts = starts.view(),
            .initial = {}};
  }

  double bytes() const { return bytes_of({&q, &k, &v, &i_gate, &f_gate}); }
};

TEST_F(CudaMixerSpeed, Mlstm) {
  struct Case {
    const char* name;
    std::int64_t states, document;
  };

  const DeviceTensor h(DType::bf16, kQueries, 0);
  const DeviceTensor d_h = speed_tensor(DType::bf16, kQueries, 16);
  for (const Case& c : {Case{"8 states", kSpeedKvHeads, kSpeedTokens},
                        Case{"8 states, documents of 4,096", kSpeedKvHeads, 4096},
                        Case{"32 states", kSpeedHeads, kSpeedTokens}}) {
    const MlstmTensors t(c.states, c.document);
    const DeviceTensor d_q(DType::bf16, kQueries, 0);
    const DeviceTensor d_k(DType::bf16, t.k.view().shape, 0);
    const DeviceTensor d_v(DType::bf16, kKeys, 0);
    const DeviceTensor d_i_gate(DType::f32, t.i_gate.view().shape, 0);
    const DeviceTensor d_f_gate(DType::f32, t.f_gate.view().shape, 0);
    measure_op(fmt::format("mLSTM {} forward", c.name),
               t.bytes() + bytes_of({&h}),
               0.0,
               MlstmForward{h.view(), {}, t.inputs()});
    measure_op(fmt::format("mLSTM {} backward", c.name),
               t.bytes() + bytes_of({&h, &d_h, &d_q, &d_k, &d_v, &d_i_gate, &d_f_gate}),
               0.0,
               MlstmBackward{.d_q = d_q.view(),
                             .d_k = d_k.view(),
                             .d_v = d_v.view(),
                             .d_i_gate = d_i_gate.view(),
                             .d_f_gate = d_f_gate.view(),
                             .d_initial_c = {},
                             .d_initial_n = {},
                             .d_h = d_h.view(),
                             .h = h.view(),
                             .d_final_c = {},
                             .d_final_n = {},
                             .inputs = t.inputs()});
  }
}

TEST_F(CudaMixerSpeed, MlstmBackwardStages) {
  const DeviceTensor h(DType::bf16, kQueries, 0);
  const DeviceTensor d_h = speed_tensor(DType::bf16, kQueries, 17);
  const DeviceTensor d_q(DType::bf16, kQueries, 0);
  const DeviceTensor d_k(DType::bf16, kKeys, 0);
  const DeviceTensor d_v(DType::bf16, kKeys, 0);
  const MlstmTensors t(kSpeedKvHeads, kSpeedTokens);
  const DeviceTensor d_i_gate(DType::f32, t.i_gate.view().shape, 0);
  const DeviceTensor d_f_gate(DType::f32, t.f_gate.view().shape, 0);
  const auto stages = test::mlstm_backward_stages(stream_,
                                                  {.d_q = d_q.view(),
                                                   .d_k = d_k.view(),
                                                   .d_v = d_v.view(),
                                                   .d_i_gate = d_i_gate.view(),
                                                   .d_f_gate = d_f_gate.view(),
                                                   .d_initial_c = {},
                                                   .d_initial_n = {},
                                                   .d_h = d_h.view(),
                                                   .h = h.view(),
                                                   .d_final_c = {},
                                                   .d_final_n = {},
                                                   .inputs = t.inputs()});
  for (const test::MlstmStage& stage : stages) {
    measure("mLSTM backward, " + stage.name, stage.bytes, 0.0, stage.run);
  }
}

TEST_F(CudaMixerSpeed, FeatureMaps) {
  for (const std::int64_t heads : {kSpeedHeads, kSpeedKvHeads}) {
    const Shape shape{kSpeedTokens, heads, kSpeedHeadDim};
    const DeviceTensor x = speed_tensor(DType::bf16, shape, 21);
    const DeviceTensor weight =
        speed_tensor(DType::bf16, {heads, kSpeedHeadDim, kSpeedHeadDim}, 22, 0.09);
    const DeviceTensor d_y = speed_tensor(DType::bf16, shape, 23);
    const DeviceTensor y(DType::bf16, shape, 0);
    const DeviceTensor d_x = speed_tensor(DType::bf16, shape, 24);
    const DeviceTensor d_weight = speed_tensor(DType::f32, weight.view().shape, 25);
    const double flop =
        2.0 * static_cast<double>(kSpeedTokens * heads * kSpeedHeadDim * kSpeedHeadDim);
    measure_op(fmt::format("feature map of {} heads forward", heads),
               bytes_of({&x, &y}),
               flop,
               FeatureMapForward{y.view(), x.view(), weight.view()});
    measure_op(fmt::format("feature map of {} heads backward", heads),
               bytes_of({&x, &y, &d_y, &d_x, &d_x}),
               2.0 * flop,
               FeatureMapBackward{
                   d_x.view(), d_weight.view(), d_y.view(), y.view(), x.view(), weight.view()});
  }
}

}  // namespace
}  // namespace bifocal
