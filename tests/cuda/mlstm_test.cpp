// The mLSTM on the device against its definition in double, forward and backward.
#include <gtest/gtest.h>

#include "cuda/mlstm_device.h"
#include "kernels/kernel_choice.h"

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

struct Problem {
  MlstmShape shape;
  std::vector<std::int64_t> documents;
};

// Widths with kernels of their own and others; states per key-value head and per query head;
// documents of one token, starts at, before and after the chunks' ends, several in one chunk.
std::vector<Problem> problems() {
  return {
      {{.heads = 1, .states = 1, .v_heads = 1, .head_dim = 1}, {1}},
      {{.heads = 4, .states = 2, .v_heads = 2, .head_dim = 5}, {64, 128}},
      {{.heads = 6, .states = 2, .v_heads = 1, .head_dim = 24}, {3, 1, 1, 130, 2}},
      {{.heads = 4, .states = 1, .v_heads = 1, .head_dim = 64}, {1, 63, 64, 65}},
      {{.heads = 4, .states = 4, .v_heads = 2, .head_dim = 64}, {200}},
      {{.heads = 1, .states = 1, .v_heads = 1, .head_dim = 64}, {127}},
      {{.heads = 8, .states = 1, .v_heads = 1, .head_dim = 128}, {20, 30, 25}},
      {{.heads = 3, .states = 1, .v_heads = 1, .head_dim = 128}, {129}},
      {{.heads = 2, .states = 2, .v_heads = 1, .head_dim = 128}, {65, 20}},
      {{.heads = 2, .states = 1, .v_heads = 1, .head_dim = 256}, {10, 90}},
      {{.heads = 6, .states = 2, .v_heads = 1, .head_dim = 256}, {65, 20}},
  };
}

// Of max |want|. float32: sums of up to 256 products and log decays of seven digits. bfloat16: one
// rounding at the store (2^-9), and weights, values and states rounded as operands of the products
// (2^-9 each, of terms that partly cancel).
double forward_bound(DType stored) {
  return stored == DType::bf16 ? 3.0 / 512.0 : 2e-6;
}

// Differences v_j - h_t of numbers near each other lose some digits of either type.
double backward_bound(DType stored) {
  return stored == DType::bf16 ? 8.0 / 512.0 : 4e-5;
}

void check_forward(const MlstmCase& test, const MlstmTypes& types) {
  SCOPED_TRACE(describe(test, types));
  CudaStream stream;
  const DeviceMlstm device(test, types);
  const MlstmOutputs want = test.forward(MlstmPath::definition);
  const DeviceTensor h(types.stored, test.q.shape(), types.shift);
  const DeviceState final(test.shape(), types.shift);
  call(stream, MlstmForward{.h = h.view(), .final = final.view(), .inputs = device.inputs()});
  const double bound = forward_bound(types.stored);
  expect_near("h", h.download(stream), want.h, bound);
  expect_near("c", final.c.download(stream), want.c, bound);
  expect_near("n", final.n.download(stream), want.n, bound);
  // m is stored in float32 for either type.
  expect_near("m", final.m.download(stream), want.m, 2e-6, 1.0);
}

struct DeviceGradients {
  DeviceTensor q, k, v, i_gate, f_gate, c, n;

  DeviceGradients(const MlstmCase& test, const MlstmTypes& types)
      : q(types.stored, test.q.shape(), types.shift),
        k(types.stored, test.k.shape(), types.shift),
        v(types.stored, test.v.shape(), types.shift),
        i_gate(types.gates, test.i_gate.shape(), types.shift),
        f_gate(types.gates, test.f_gate.shape(), types.shift),
        c(DType::f32, test.d_final_c.shape(), types.shift),
        n(DType::f32, test.d_final_n.shape(), types.shift) {}

  MlstmBackward op(const DeviceMlstm& device, const DeviceTensor& h) const {
    MlstmBackward op{.d_q = q.view(),
                     .d_k = k.view(),
                     .d_v = v.view(),
                     .d_i_gate = i_gate.view(),
                     .d_f_gate = f_gate.view(),
                     .d_initial_c = {},
                     .d_initial_n = {},
                     .d_h = device.d_h.view(),
                     .h = h.view(),
                     .d_final_c = device.d_final_c.view(),
                     .d_final_n = device.d_final_n.view(),
                     .inputs = device.inputs()};
    if (device.carried()) {
      op.d_initial_c = c.view();
      op.d_initial_n = n.view();
    }
    return op;
  }
};

double largest(const Tensor& x) {
  double result = 0;
  for (std::int64_t i = 0; i < x.size(); ++i) {
    result = std::max(result, std::abs(x.as<double>()[i]));
  }
  return result;
}

// Relative to max|want| of a tensor, or to a part of the largest of all gradients where that is
// more: gates that decide nothing have gradients of pure rounding.
void expect_gradients(const DeviceGradients& got,
                      const MlstmGradients& want,
                      CudaStream& stream,
                      double bound,
                      double part) {
  double all = 0;
  for (const Tensor* x : {&want.q, &want.k, &want.v, &want.i_gate, &want.f_gate}) {
    all = std::max(all, largest(*x));
  }
  const double floor = part * all;
  expect_near("d_q", got.q.download(stream), want.q, bound, floor);
  expect_near("d_k", got.k.download(stream), want.k, bound, floor);
  expect_near("d_v", got.v.download(stream), want.v, bound, floor);
  expect_near("d_i_gate", got.i_gate.download(stream), want.i_gate, bound, floor);
  expect_near("d_f_gate", got.f_gate.download(stream), want.f_gate, bound, floor);
  if (want.c) {
    expect_near("d_initial_c", got.c.download(stream), want.c, bound, floor);
    expect_near("d_initial_n", got.n.download(stream), want.n, bound, floor);
  }
}

// Hopper's backward pass finds h anew from the other inputs, without the rounding of its store.
bool backward_reads_h(const MlstmCase& test, const MlstmTypes& types) {
  const std::int64_t dim = test.shape().head_dim;
  return !use_hopper_kernels() || types.stored != DType::bf16 || types.shift != 0 ||
         (dim != 64 && dim != 128);
}

// What a forward pass keeps is an input of this one where it is read: its rounding then counts, in
// gradients that are differences v_j - h_t.
void check_backward(const MlstmCase& test, const MlstmTypes& types, double part = 0.01) {
  SCOPED_TRACE(describe(test, types));
  CudaStream stream;
  const DeviceMlstm device(test, types);
  const MlstmOutputs out = test.forward(MlstmPath::definition);
  if (backward_reads_h(test, types)) {
    test::round_to(types.stored, out.h);
  }
  const MlstmGradients want = test.backward(MlstmPath::definition, out.h);
  const DeviceTensor h = test::on_device(out.h, types.stored, types.shift);
  const DeviceGradients got(test, types);
  call(stream, got.op(device, h));
  expect_gradients(got, want, stream, backward_bound(types.stored), part);
}

template <class Check>
void for_all_problems(const Check& check) {
  for (const Problem& problem : problems()) {
    for (const auto start : {MlstmStart::fresh, MlstmStart::carried}) {
      for (const MlstmTypes& types : test::mlstm_types()) {
        MlstmCase test(problem.shape, problem.documents, start);
        test::round_inputs(test, types);
        check(test, types);
      }
    }
  }
}

class CudaMlstm : public testing::TestWithParam<KernelChoice> {
 protected:
  void SetUp() override { set_kernel_choice(GetParam()); }

  void TearDown() override { set_kernel_choice(KernelChoice::automatic); }
};

INSTANTIATE_TEST_SUITE_P(Portable, CudaMlstm, testing::Values(KernelChoice::portable));
INSTANTIATE_TEST_SUITE_P(Hopper, CudaMlstm, testing::Values(KernelChoice::automatic));

TEST_P(CudaMlstm, ForwardMatchesTheDefinition) {
  for_all_problems(check_forward);
}

TEST_P(CudaMlstm, GradientsMatchTheDefinition) {
  for_all_problems(
      [](const MlstmCase& test, const MlstmTypes& types) { check_backward(test, types); });
}

// The state fades within a token or hardly at all, or gates jump between extremes; a state enters
// and the final state has a gradient.
// 128 and 256 are widths of Hopper's kernels, which are bfloat16.
void check_decays(std::int64_t head_dim) {
  const MlstmShape shape{.heads = 4, .states = 2, .v_heads = 2, .head_dim = head_dim};
  for (const MlstmTypes& types : test::mlstm_types()) {
    if (head_dim > 64 && types.stored != DType::bf16) {
      continue;
    }
    for (const double forget : {-40.0, -8.0, 8.0, 40.0}) {
      MlstmCase test(shape, {70, 1, 150}, MlstmStart::carried);
      test::fill_normal(test.f_gate, 5, 0.1, forget);
      test::round_inputs(test, types);
      check_forward(test, types);
      // Where all fades, h_t is v_t, and queries and keys get differences of equal numbers: the
      // rounding of terms as large as the gradient of values.
      check_backward(test, types, forget == -40.0 ? 1.0 : 0.01);
    }
    MlstmCase test(shape, {70, 1, 150}, MlstmStart::carried);
    test::fill(test.f_gate, [&](std::int64_t i) { return i % 14 < 10 ? 40.0 : -40.0; });
    test::fill(test.i_gate, [&](std::int64_t i) { return i % 6 < 4 ? 40.0 : -40.0; });
    test::round_inputs(test, types);
    check_forward(test, types);
    check_backward(test, types);
  }
}

TEST_P(CudaMlstm, StrongAndWeakDecayKeepTheirDigits) {
  check_decays(64);
  check_decays(128);
  check_decays(256);
}

// Forget gates near 1 carry the first document over hundreds of tokens: a state that leaks across
// a start cannot hide behind its decay.
void check_long_memory(std::int64_t head_dim) {
  for (const MlstmTypes& types : test::mlstm_types()) {
    MlstmCase test({.heads = 2, .states = 1, .v_heads = 1, .head_dim = head_dim},
                   {300, 7, 140, 33},
                   MlstmStart::carried);
    test::fill_normal(test.f_gate, 6, 0.1, 8.0);
    for (std::int64_t i = 0; i < 300 * head_dim; ++i) {
      test.v.as<double>()[i] += 100.0;  // seen far away if it leaks
    }
    test::round_inputs(test, types);
    check_forward(test, types);
  }
}

TEST_P(CudaMlstm, LongMemoryStopsAtDocuments) {
  check_long_memory(64);
  check_long_memory(128);
  check_long_memory(256);
}

// So many states that a block takes several chunks of one, one after another, and several blocks
// share a state.
TEST_P(CudaMlstm, ForwardMatchesTheDefinitionInSegmentsOfChunks) {
  for (const auto& [dim, states] : {std::pair{128, 33}, std::pair{256, 9}}) {
    for (const auto start : {MlstmStart::fresh, MlstmStart::carried}) {
      for (const std::int64_t readers : {1, 3}) {
        const MlstmTypes types{DType::bf16, DType::f32, 0};
        MlstmCase test(
            {.heads = states * readers, .states = states, .v_heads = states, .head_dim = dim},
            {300, 7, dim == 128 ? 500 : 200, 129},
            start);
        test::fill_normal(test.f_gate, 6, 1.0, 4.0);
        test::round_inputs(test, types);
        check_forward(test, types);
      }
    }
  }
}

TEST_P(CudaMlstm, AnEmptyRowPassesItsState) {
  CudaStream stream;
  for (const MlstmTypes& types : test::mlstm_types()) {
    MlstmCase test(
        {.heads = 2, .states = 2, .v_heads = 1, .head_dim = 64}, {}, MlstmStart::carried);
    test::round_inputs(test, types);
    check_forward(test, types);
    check_backward(test, types);
  }
}

TEST_P(CudaMlstm, RefusesBfloat16States) {
  const MlstmTypes types{DType::bf16, DType::bf16, 0};
  const MlstmCase test(
      {.heads = 2, .states = 2, .v_heads = 1, .head_dim = 64}, {5}, MlstmStart::fresh);
  const DeviceMlstm device(test, types);
  const DeviceTensor h(DType::bf16, test.q.shape(), 0);
  const DeviceTensor c(DType::bf16, {2, 64, 64}, 0);
  const DeviceTensor n(DType::bf16, {2, 64}, 0);
  const DeviceTensor m(DType::bf16, {2}, 0);
  const MlstmForward op{
      .h = h.view(), .final = {c.view(), n.view(), m.view()}, .inputs = device.inputs()};
  EXPECT_THROW(op.check(), Error);
}

TEST_P(CudaMlstm, AlternatingInputsGiveTheSameBitsEveryTime) {
  CudaStream stream;
  const MlstmShape shapes[] = {{.heads = 4, .states = 1, .v_heads = 1, .head_dim = 128},
                               {.heads = 4, .states = 1, .v_heads = 1, .head_dim = 64},
                               {.heads = 2, .states = 1, .v_heads = 1, .head_dim = 256}};
  constexpr int kCases = 3;
  for (const DType stored : {DType::bf16, DType::f32}) {
    const MlstmTypes types{stored, stored, 0};
    const MlstmCase tests[] = {{shapes[0], {50, 150}, MlstmStart::carried, 1},
                               {shapes[1], {100, 33}, MlstmStart::carried, 2},
                               {shapes[2], {50, 150}, MlstmStart::carried, 3}};
    std::vector<std::vector<double>> first[kCases];
    for (int repeat = 0; repeat < 50 * kCases; ++repeat) {
      const MlstmCase& test = tests[repeat % kCases];
      const DeviceMlstm device(test, types);
      const DeviceTensor h(stored, test.q.shape(), 0);
      const DeviceState final(test.shape(), 0);
      const DeviceGradients gradients(test, types);
      call(stream, MlstmForward{.h = h.view(), .final = final.view(), .inputs = device.inputs()});
      call(stream, gradients.op(device, h));
      std::vector<std::vector<double>> got;
      for (const DeviceTensor* x : {&h,
                                    &final.c,
                                    &final.n,
                                    &gradients.q,
                                    &gradients.k,
                                    &gradients.v,
                                    &gradients.i_gate,
                                    &gradients.f_gate,
                                    &gradients.c,
                                    &gradients.n}) {
        got.push_back(x->download(stream));
      }
      if (repeat < kCases) {
        first[repeat] = got;
      }
      for (std::size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(got[i], first[repeat % kCases][i])
            << name_of(stored) << " repeat " << repeat << " result " << i;
      }
    }
  }
}

}  // namespace
}  // namespace bifocal
