// Times of matrix products, losses, the embedding and decode products at the shape of Qwen3-4B.
#include <algorithm>
#include <vector>

#include "cuda/speed.h"
#include "kernels/cuda_stream.h"
#include "ops/decode_layer.h"
#include "ops/distill_loss.h"
#include "ops/embedding.h"
#include "ops/linear.h"

namespace bifocal {
namespace {

using test::CudaSpeed;
using test::DeviceTensor;
using test::kSpeedHeadDim;
using test::kSpeedHeads;
using test::kSpeedHidden;
using test::kSpeedIntermediate;
using test::kSpeedKvHeads;
using test::kSpeedTokens;
using test::numbers_on_device;
using test::speed_tensor;

constexpr std::int64_t kVocabulary = 151936;
constexpr auto kBf16 = DType::bf16;
constexpr auto kF32 = DType::f32;

struct Product {
  const char* name;
  std::int64_t out, in;
};

const Product kProducts[] = {{"q, k, v together", 6144, kSpeedHidden},
                             {"q", 4096, kSpeedHidden},
                             {"k or v", 1024, kSpeedHidden},
                             {"output", kSpeedHidden, 4096},
                             {"gate or up", kSpeedIntermediate, kSpeedHidden},
                             {"down", kSpeedHidden, kSpeedIntermediate},
                             {"memory gates", kSpeedKvHeads, kSpeedHidden},
                             {"mix gates", kSpeedHeads, kSpeedHidden}};

TEST_F(CudaSpeed, MatrixProducts) {
  for (const Product& p : kProducts) {
    const DeviceTensor x = speed_tensor(kBf16, {kSpeedTokens, p.in}, 1);
    const DeviceTensor y = speed_tensor(kBf16, {kSpeedTokens, p.out}, 2);
    const DeviceTensor weight = speed_tensor(kBf16, {p.out, p.in}, 3, 0.02);
    const DeviceTensor d_weight = speed_tensor(kF32, {p.out, p.in}, 4);
    const DeviceTensor d_bias = speed_tensor(kF32, {p.out}, 5);
    const double flop = 2.0 * static_cast<double>(kSpeedTokens * p.out) * static_cast<double>(p.in);
    const auto input = static_cast<double>(x.view().bytes());
    const auto output = static_cast<double>(y.view().bytes());
    const auto weights = static_cast<double>(weight.view().bytes());
    const auto name = [&](const char* pass) {
      return fmt::format("{} {} x {}: {}", p.name, p.out, p.in, pass);
    };
    const double bytes = input + output + weights;
    measure_op(name("forward"), bytes, flop, LinearForward{y.view(), x.view(), weight.view(), {}});
    measure_op(
        name("d_x"), bytes, flop, LinearBackwardInput{x.view(), y.view(), weight.view(), false});
    measure_op(name("d_weight"),
               bytes + 3.0 * weights,
               flop,
               LinearBackwardWeight{d_weight.view(), {}, y.view(), x.view()});
    measure_op(name("d_weight and d_bias"),
               bytes + 3.0 * weights + output,
               flop,
               LinearBackwardWeight{d_weight.view(), d_bias.view(), y.view(), x.view()});
  }
}

// One row's logits: both models' products, the loss, and the gradients of hidden states and head.
struct Head {
  DeviceTensor hidden = speed_tensor(kBf16, {kSpeedTokens, kSpeedHidden}, 1);
  DeviceTensor teacher_hidden = speed_tensor(kBf16, {kSpeedTokens, kSpeedHidden}, 2);
  DeviceTensor weight = speed_tensor(kBf16, {kVocabulary, kSpeedHidden}, 3, 0.05);
  DeviceTensor teacher_weight = speed_tensor(kBf16, {kVocabulary, kSpeedHidden}, 4, 0.05);
  DeviceTensor d_hidden = speed_tensor(kBf16, {kSpeedTokens, kSpeedHidden}, 5);
  DeviceTensor d_weight = speed_tensor(kF32, {kVocabulary, kSpeedHidden}, 6);
  DeviceTensor next = numbers_on_device(std::vector<std::int32_t>(kSpeedTokens, 17));
  DeviceTensor kl_weight = numbers_on_device(std::vector<double>(kSpeedTokens, 0.5));
  DeviceTensor ce_weight = numbers_on_device(std::vector<double>(kSpeedTokens, 0.5));
  DeviceTensor kl = numbers_on_device(std::vector<double>(kSpeedTokens));
  DeviceTensor ce = numbers_on_device(std::vector<double>(kSpeedTokens));
  DeviceTensor agree = numbers_on_device(std::vector<std::uint8_t>(kSpeedTokens));
  DeviceTensor logits, teacher_logits, d_logits;

  Head(std::int64_t chunk, DType gradient)
      : logits(kF32, {chunk, kVocabulary}, 0),
        teacher_logits(kF32, {chunk, kVocabulary}, 0),
        d_logits(gradient, {chunk, kVocabulary}, 0) {}

  DistillLoss loss(std::int64_t begin, std::int64_t end) const {
    const std::int64_t rows = end - begin;
    return {d_logits.view().rows(0, rows),
            kl.view().rows(begin, end),
            ce.view().rows(begin, end),
            agree.view().rows(begin, end),
            logits.view().rows(0, rows),
            teacher_logits.view().rows(0, rows),
            next.view().rows(begin, end),
            kl_weight.view().rows(begin, end),
            ce_weight.view().rows(begin, end)};
  }

  void forward(CudaStream& stream, std::int64_t begin, std::int64_t end) const {
    const std::int64_t rows = end - begin;
    run(stream,
        LinearForward{
            logits.view().rows(0, rows), hidden.view().rows(begin, end), weight.view(), {}});
    run(stream,
        LinearForward{teacher_logits.view().rows(0, rows),
                      teacher_hidden.view().rows(begin, end),
                      teacher_weight.view(),
                      {}});
  }

  void backward(CudaStream& stream, std::int64_t begin, std::int64_t end) const {
    const TensorView d = d_logits.view().rows(0, end - begin);
    run(stream, LinearBackwardInput{d_hidden.view().rows(begin, end), d, weight.view(), false});
    run(stream, LinearBackwardWeight{d_weight.view(), {}, d, hidden.view().rows(begin, end)});
  }

  double scratch_gb() const {
    const std::size_t bytes =
        logits.view().bytes() + teacher_logits.view().bytes() + d_logits.view().bytes();
    return static_cast<double>(bytes) * 1e-9;
  }
};

TEST_F(CudaSpeed, LogitLossHead) {
  const double flop = 8.0 * static_cast<double>(kSpeedTokens * kVocabulary) * kSpeedHidden;
  for (const std::int64_t chunk : {1024, 1536, 2048}) {
    const Head head(chunk, kBf16);
    const auto name = [&](const char* part) {
      return fmt::format("head, chunks of {} ({:.2f} GB): {}", chunk, head.scratch_gb(), part);
    };
    const auto each = [&](const auto& function) {
      for (std::int64_t begin = 0; begin < kSpeedTokens; begin += chunk) {
        function(begin, std::min(begin + chunk, kSpeedTokens));
      }
    };
    measure(name("whole row"), 0.0, flop, [&] {
      each([&](std::int64_t begin, std::int64_t end) {
        head.forward(stream_, begin, end);
        run(stream_, head.loss(begin, end));
        head.backward(stream_, begin, end);
      });
    });
    measure(name("logits"), 0.0, flop / 2.0, [&] {
      each([&](std::int64_t begin, std::int64_t end) { head.forward(stream_, begin, end); });
    });
    const double logits = static_cast<double>(kSpeedTokens) * kVocabulary;
    measure(name("loss"), 18.0 * logits, 0.0, [&] {
      each([&](std::int64_t begin, std::int64_t end) { run(stream_, head.loss(begin, end)); });
    });
    measure(name("gradients"), 0.0, flop / 2.0, [&] {
      each([&](std::int64_t begin, std::int64_t end) { head.backward(stream_, begin, end); });
    });
  }
}

TEST_F(CudaSpeed, LogitLossKernel) {
  const std::int64_t rows = 1536;
  const double logits = static_cast<double>(rows) * kVocabulary;
  for (const DType gradient : {kBf16, kF32}) {
    const Head head(rows, gradient);
    head.forward(stream_, 0, rows);
    DistillLoss op = head.loss(0, rows);
    const double written = static_cast<double>(size_of(gradient));
    const std::string name = fmt::format("loss to {}", name_of(gradient));
    measure_op(name, (16.0 + written) * logits, 0.0, op);
    DistillLoss values = op;
    values.d_student = {};
    measure_op(name + ", values only", 16.0 * logits, 0.0, values);
    DistillLoss plain = op;
    plain.teacher = {};
    plain.kl = {};
    plain.agree = {};
    measure_op(name + ", cross entropy", (8.0 + written) * logits, 0.0, plain);
    op.temperature = 2.0;
    measure_op(name + ", temperature 2", (16.0 + written) * logits, 0.0, op);
  }
}

TEST_F(CudaSpeed, EmbeddingAndAlignLoss) {
  const DeviceTensor x = speed_tensor(kBf16, {kSpeedTokens, kSpeedHidden}, 1);
  const DeviceTensor table = speed_tensor(kBf16, {kVocabulary, kSpeedHidden}, 2);
  const DeviceTensor d_table = speed_tensor(kF32, {kVocabulary, kSpeedHidden}, 3);
  const auto row_bytes = static_cast<double>(x.view().bytes());
  const auto ids_below = [&](std::uint64_t bound) {
    std::vector<std::int32_t> ids(kSpeedTokens);
    for (std::size_t t = 0; t < ids.size(); ++t) {
      // Skewed as words are: the cube favours low ids.
      const double u = random_uniform(7, 1, t);
      ids[t] = static_cast<std::int32_t>(u * u * u * static_cast<double>(bound));
    }
    return ids;
  };
  for (const std::uint64_t bound : {151936, 100, 1}) {
    const std::vector<std::int32_t> host = ids_below(bound);
    std::vector<std::int32_t> distinct = host;
    std::ranges::sort(distinct);
    const auto [first, last] = std::ranges::unique(distinct);
    const auto used = static_cast<double>(first - distinct.begin());
    const DeviceTensor ids = numbers_on_device(host);
    const std::string name = fmt::format("embedding of {} ids", used);
    measure_op(name, 2.0 * row_bytes, 0.0, EmbeddingForward{x.view(), ids.view(), table.view()});
    measure_op(name + ", backward",
               row_bytes + used * kSpeedHidden * 8.0,
               0.0,
               EmbeddingBackward{d_table.view(), x.view(), ids.view()});
  }
  const Shape heads{kSpeedTokens, kSpeedHeads, kSpeedHeadDim};
  const DeviceTensor student = speed_tensor(kBf16, heads, 4);
  const DeviceTensor teacher = speed_tensor(kBf16, heads, 5);
  const DeviceTensor d_student = speed_tensor(kBf16, heads, 6);
  const DeviceTensor keep = numbers_on_device(std::vector<std::uint8_t>(kSpeedTokens, 1));
  const DeviceTensor sums = numbers_on_device(std::vector<double>(2));
  measure_op("align loss",
             3.0 * static_cast<double>(student.view().bytes()),
             0.0,
             AlignLoss{d_student.view(), sums.view(), student.view(), teacher.view(), keep.view()});
}

// Weights of several layers in turn, more than the cache holds, as in generation.
TEST_F(CudaSpeed, DecodeProducts) {
  constexpr Product kDecode[] = {{"q, k, v", 6144, kSpeedHidden},
                                 {"output", kSpeedHidden, 4096},
                                 {"gate or up", kSpeedIntermediate, kSpeedHidden},
                                 {"down", kSpeedHidden, kSpeedIntermediate},
                                 {"head", kVocabulary, kSpeedHidden}};
  constexpr double kSetBytes = 1e9;
  for (const Product& p : kDecode) {
    const double bytes = 2.0 * static_cast<double>(p.out * p.in);
    const auto copies = std::max<std::int64_t>(1, static_cast<std::int64_t>(kSetBytes / bytes));
    const DeviceTensor weights = speed_tensor(kBf16, {copies, p.out, p.in}, 1, 0.02);
    for (const std::int64_t rows : {1, 4, 8, 16}) {
      const DeviceTensor x = speed_tensor(kBf16, {rows, p.in}, 2);
      const DeviceTensor y(kBf16, {rows, p.out}, 0);
      const std::string name =
          fmt::format("decode {} {} x {}, {} rows, {} layers", p.name, p.out, p.in, rows, copies);
      measure(name, bytes * static_cast<double>(copies), 0.0, [&] {
        for (std::int64_t i = 0; i < copies; ++i) {
          const TensorView weight = weights.view().rows(i, i + 1).reshape({p.out, p.in});
          const DecodeProduct product{.y = y.view(), .weight = weight};
          run(stream_, DecodeProducts{.products = {&product, 1}, .x = x.view()});
        }
      });
    }
  }
}

}  // namespace
}  // namespace bifocal
