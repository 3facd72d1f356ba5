// Softmax features on the device against their CPU op in double.
#include "ops/feature_map.h"

#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "kernels/cuda_stream.h"
#include "kernels/kernel_choice.h"
#include "ops/elementwise.h"
#include "support/compare.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::on_device;
using test::stored_normals;

struct Sizes {
  std::int64_t tokens, heads, x_heads, dim;
};

// Widths with kernels of their own and others; token counts around tiles and spans; repeated keys.
const Sizes kSizes[] = {{1, 1, 1, 1},
                        {70, 2, 1, 5},
                        {63, 4, 2, 72},
                        {65, 4, 4, 64},
                        {129, 4, 1, 64},
                        {200, 3, 3, 128},
                        {1, 2, 1, 128},
                        {1100, 1, 1, 64},
                        {130, 2, 1, 256},
                        {64, 1, 1, 256}};

void expect_near(const char* name,
                 const std::vector<double>& got,
                 const ConstTensorView& want,
                 double bound) {
  const test::Difference d = test::difference(got, test::to_doubles(want));
  EXPECT_LE(d.largest, bound * d.scale)
      << name << ' ' << to_string(want.shape) << ": " << d.describe();
}

// Logits of a unit's size, as near an identity of norm 1 the pretrained features have.
struct Problem {
  Tensor x, weight, d_y;
};

Problem make_problem(Memory& memory, DType stored, const Sizes& s) {
  return {
      stored_normals(memory, stored, {s.tokens, s.x_heads, s.dim}, 21),
      stored_normals(
          memory, stored, {s.heads, s.dim, s.dim}, 22, 1.0 / std::sqrt(static_cast<double>(s.dim))),
      stored_normals(memory, stored, {s.tokens, s.heads, s.dim}, 23)};
}

void expect_forward_matches(const Sizes& s, DType stored, int shift) {
  SCOPED_TRACE(fmt::format("{} shifted {}", name_of(stored), shift));
  CudaStream stream;
  CpuStream cpu;
  Memory memory;
  const Problem p = make_problem(memory, stored, s);
  const Tensor want = memory.empty(Region::activations, DType::f64, p.d_y.shape());
  run(cpu, FeatureMapForward{want, p.x, p.weight});
  const DeviceTensor x = on_device(p.x, stored, shift);
  const DeviceTensor weight = on_device(p.weight, stored, shift);
  const DeviceTensor y(stored, p.d_y.shape(), shift);
  const FeatureMapForward op{y.view(), x.view(), weight.view()};
  op.check();
  run(stream, op);
  // Products of bfloat16 are exact in float32; a logit's error of 256 roundoffs of its terms is one
  // of as much in the feature, relative to itself.
  test::expect_close(y.download(stream), want, stored, 300);
}

// d_x and d_weight are added to what is there.
void expect_gradients_match(const Sizes& s, DType stored, int shift, DType sums) {
  SCOPED_TRACE(fmt::format("{} shifted {}, sums {}", name_of(stored), shift, name_of(sums)));
  CudaStream stream;
  CpuStream cpu;
  Memory memory;
  const Problem p = make_problem(memory, stored, s);
  const Tensor y = memory.empty(Region::activations, DType::f64, p.d_y.shape());
  run(cpu, FeatureMapForward{y, p.x, p.weight});
  for (std::int64_t i = 0; i < y.size(); ++i) {
    y.as<double>()[i] = test::rounded(stored, y.as<double>()[i]);
  }
  const Tensor want_x = stored_normals(memory, stored, p.x.shape(), 24, 0.01);
  const Tensor want_weight = stored_normals(memory, sums, p.weight.shape(), 25, 0.01);
  const DeviceTensor d_x = on_device(want_x, stored, shift);
  const DeviceTensor d_weight = on_device(want_weight, sums, shift);
  run(cpu, FeatureMapBackward{want_x, want_weight, p.d_y, y, p.x, p.weight});
  const DeviceTensor device_y = on_device(y, stored, shift);
  const DeviceTensor d_y = on_device(p.d_y, stored, shift);
  const DeviceTensor x = on_device(p.x, stored, shift);
  const DeviceTensor weight = on_device(p.weight, stored, shift);
  const FeatureMapBackward op{
      d_x.view(), d_weight.view(), d_y.view(), device_y.view(), x.view(), weight.view()};
  op.check();
  run(stream, op);
  // bfloat16: d_z is rounded as an operand and the result at its store, 2^-9 each. Hopper's kernels
  // store d_x once for each head that reads an x; such errors are independent.
  const double bound = stored == DType::bf16 ? 4.0 / 512.0 : 2e-6;
  expect_near("d_x", d_x.download(stream), want_x, bound);
  expect_near("d_weight", d_weight.download(stream), want_weight, bound);
}

// Once with each choice of kernels; what may run Hopper's has a name of that kind.
class CudaFeatureMap : public testing::TestWithParam<KernelChoice> {
 protected:
  void SetUp() override { set_kernel_choice(GetParam()); }

  void TearDown() override { set_kernel_choice(KernelChoice::automatic); }
};

INSTANTIATE_TEST_SUITE_P(Portable, CudaFeatureMap, testing::Values(KernelChoice::portable));
INSTANTIATE_TEST_SUITE_P(Hopper, CudaFeatureMap, testing::Values(KernelChoice::automatic));

TEST_P(CudaFeatureMap, ForwardMatchesTheCpuOp) {
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const Sizes& s : kSizes) {
      expect_forward_matches(s, stored, shift);
    }
  }
}

TEST_P(CudaFeatureMap, GradientsMatchTheCpuOp) {
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const DType sums : {DType::f32, stored}) {
      for (const Sizes& s : kSizes) {
        expect_gradients_match(s, stored, shift, sums);
      }
    }
  }
}

// Heads enough that each has one block of an H200, and more tiles than the block's ring has places.
TEST_P(CudaFeatureMap, PlacesOfRingsAreUsedSeveralTimes) {
  for (const Sizes& s :
       {Sizes{1300, 133, 1, 64}, Sizes{1670, 67, 1, 128}, Sizes{450, 67, 1, 256}}) {
    expect_forward_matches(s, DType::bf16, 0);
  }
  for (const Sizes& s :
       {Sizes{450, 133, 133, 64}, Sizes{450, 67, 67, 128}, Sizes{450, 34, 34, 256}}) {
    expect_gradients_match(s, DType::bf16, 0, DType::f32);
  }
}

TEST_P(CudaFeatureMap, AlternatingInputsGiveTheSameBitsEveryTime) {
  CudaStream stream;
  Memory memory;
  const Sizes s{300, 2, 1, 128};
  for (const DType stored : {DType::f32, DType::bf16}) {
    std::vector<double> first[2][2];
    for (int repeat = 0; repeat < 100; ++repeat) {
      const int which = repeat % 2;
      const DeviceTensor x = on_device(
          stored_normals(memory, stored, {s.tokens, s.x_heads, s.dim}, 31 + which), stored, 0);
      const DeviceTensor weight = on_device(
          stored_normals(memory, stored, {s.heads, s.dim, s.dim}, 33 + which, 0.1), stored, 0);
      const DeviceTensor y(stored, {s.tokens, s.heads, s.dim}, 0);
      run(stream, FeatureMapForward{y.view(), x.view(), weight.view()});
      const DeviceTensor d_x(stored, x.view().shape, 0);
      const DeviceTensor d_weight(DType::f32, weight.view().shape, 0);
      run(stream, Zero{d_x.view()});
      run(stream, Zero{d_weight.view()});
      run(stream,
          FeatureMapBackward{
              d_x.view(), d_weight.view(), y.view(), y.view(), x.view(), weight.view()});
      const std::vector<double> got[] = {d_x.download(stream), d_weight.download(stream)};
      for (int i = 0; i < 2; ++i) {
        if (repeat < 2) {
          first[which][i] = got[i];
        }
        ASSERT_EQ(got[i], first[which][i]) << name_of(stored) << " repeat " << repeat;
      }
    }
  }
}

}  // namespace
}  // namespace bifocal
