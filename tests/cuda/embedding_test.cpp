// Token embedding on the device: copies exactly; gradients of small integers have exact sums.
#include "ops/embedding.h"

#include <cmath>

#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "kernels/cuda_stream.h"
#include "support/fill.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::on_device;
using test::stored_normals;

// The same numbers on the device.
DeviceTensor copied_to_device(const ConstTensorView& values) {
  return on_device(values, values.dtype, 0);
}

class CudaEmbedding : public testing::Test {
 protected:
  Tensor ids(std::int64_t tokens, std::int64_t vocabulary) {
    Tensor x = memory_.empty(Region::activations, DType::i32, {tokens});
    test::fill_below(x, 2, vocabulary);
    return x;
  }

  // Integers from -8 to 8, which both types hold, as do sums of a thousand in float32.
  Tensor integers(const Shape& shape, std::uint64_t seed) {
    Tensor x = memory_.empty(Region::activations, DType::f64, shape);
    for (std::int64_t i = 0; i < x.size(); ++i) {
      const std::uint64_t below = random_below(17, seed, 1, static_cast<std::uint64_t>(i));
      x.as<double>()[i] = static_cast<double>(below) - 8.0;
    }
    return x;
  }

  void expect_gradient(const Tensor& id, const Shape& table, DType stored, int shift) {
    const Tensor d_y = integers({id.shape()[0], table[1]}, 5);
    const Tensor want = integers(table, 6);
    const DeviceTensor d_table = on_device(want, DType::f32, shift);
    run(cpu_, EmbeddingBackward{want, d_y, id});
    const DeviceTensor device_ids = copied_to_device(id);
    const DeviceTensor device_d_y = on_device(d_y, stored, shift);
    const EmbeddingBackward op{d_table.view(), device_d_y.view(), device_ids.view()};
    op.check();
    run(stream_, op);
    const std::vector<double> got = d_table.download(stream_);
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i], want.as<double>()[i])
          << "id " << static_cast<std::int64_t>(i) / table[1] << " column "
          << static_cast<std::int64_t>(i) % table[1];
    }
  }

  Memory memory_;
  CpuStream cpu_;
  CudaStream stream_;
};

TEST_F(CudaEmbedding, CopiesRows) {
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const Shape& table : {Shape{29, 33}, Shape{7, 8}, Shape{100, 2560}, Shape{3, 1}}) {
      for (const std::int64_t tokens : {0, 1, 17, 300}) {
        const Tensor values = stored_normals(memory_, stored, table, 1);
        const Tensor id = ids(tokens, table[0]);
        const Tensor want = memory_.empty(Region::activations, DType::f64, {tokens, table[1]});
        run(cpu_, EmbeddingForward{want, id, values});
        const DeviceTensor y(stored, want.shape(), shift);
        const DeviceTensor device_ids = copied_to_device(id);
        const DeviceTensor device_table = on_device(values, stored, shift);
        const EmbeddingForward op{y.view(), device_ids.view(), device_table.view()};
        op.check();
        run(stream_, op);
        const std::vector<double> got = y.download(stream_);
        EXPECT_TRUE(std::equal(got.begin(), got.end(), want.as<double>()))
            << name_of(stored) << " shifted " << shift << ", table " << to_string(table) << ", "
            << tokens << " tokens";
      }
    }
  }
}

// An id that the table lacks gives NaN, and its gradient goes nowhere.
TEST_F(CudaEmbedding, UnknownIdsAreSeen) {
  const Tensor table = stored_normals(memory_, DType::f32, {5, 12}, 1);
  const DeviceTensor id =
      copied_to_device(test::tensor_of<std::int32_t>(memory_, {4, -1, 5, 0, 2147483647}));
  const DeviceTensor y(DType::f32, {5, 12}, 0);
  const DeviceTensor d_table = on_device(table, DType::f32, 0);
  run(stream_, EmbeddingForward{y.view(), id.view(), d_table.view()});
  const std::vector<double> got = y.download(stream_);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const std::size_t token = i / 12;
    EXPECT_EQ(std::isnan(got[i]), token != 0 && token != 3) << "element " << i;
  }
  const Tensor ones = memory_.empty(Region::activations, DType::f64, {5, 12});
  test::fill(ones, [](std::int64_t) { return 1.0; });
  const DeviceTensor d_y = on_device(ones, DType::f32, 0);
  const DeviceTensor sums =
      on_device(memory_.zeros(Region::activations, DType::f64, {5, 12}), DType::f32, 0);
  run(stream_, EmbeddingBackward{sums.view(), d_y.view(), id.view()});
  const std::vector<double> d = sums.download(stream_);
  for (std::size_t i = 0; i < d.size(); ++i) {
    EXPECT_EQ(d[i], i / 12 == 0 || i / 12 == 4 ? 1.0 : 0.0) << "element " << i;
  }
}

// Tokens around a span of 32; few ids, so that runs cross one span or many, and more ids than
// tokens.
TEST_F(CudaEmbedding, GradientMatchesTheCpuOp) {
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const std::int64_t tokens : {0, 1, 31, 32, 33, 64, 65, 1000}) {
      for (const Shape& table : {Shape{1, 8}, Shape{3, 33}, Shape{40, 72}, Shape{5000, 16}}) {
        SCOPED_TRACE(fmt::format("{} shifted {}, {} tokens, table {}",
                                 name_of(stored),
                                 shift,
                                 tokens,
                                 to_string(table)));
        expect_gradient(ids(tokens, table[0]), table, stored, shift);
      }
    }
  }
  expect_gradient(ids(500, 151936), {151936, 64}, DType::bf16, 0);
  expect_gradient(ids(300, 11), {11, 2560}, DType::bf16, 0);
}

TEST_F(CudaEmbedding, AlternatingGradientsGiveTheSameBitsEveryTime) {
  const std::int64_t tokens = 1500;
  const DeviceTensor id = copied_to_device(ids(tokens, 37));
  const Tensor zeros = memory_.zeros(Region::activations, DType::f64, {37, 264});
  DeviceTensor d_table(DType::f32, {37, 264}, 0);
  const DeviceTensor d_y[] = {
      on_device(stored_normals(memory_, DType::bf16, {tokens, 264}, 1), DType::bf16, 0),
      on_device(stored_normals(memory_, DType::bf16, {tokens, 264}, 2), DType::bf16, 0)};
  std::vector<double> first[2];
  for (std::size_t repeat = 0; repeat < 100; ++repeat) {
    d_table.upload(zeros);
    run(stream_, EmbeddingBackward{d_table.view(), d_y[repeat % 2].view(), id.view()});
    const std::vector<double> got = d_table.download(stream_);
    if (repeat < 2) {
      first[repeat] = got;
    }
    ASSERT_TRUE(got == first[repeat % 2]) << "repeat " << repeat;
  }
}

}  // namespace
}  // namespace bifocal
