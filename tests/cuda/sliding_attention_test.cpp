// Sliding attention on the device against its CPU op in double. Tensors on multiples of 16 bytes go
// to the tensor cores where type and head width allow; shifted ones to the plain kernels.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "cuda/device_attention.h"
#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"
#include "kernels/kernel_choice.h"
#include "ops/attention_problem.h"

namespace bifocal {
namespace {

using test::DeviceProblem;
using test::DeviceTensor;
using test::kFull;
using test::Layout;
using test::Problem;

struct Bounds {
  double whole;    // norm of the error over the norm of the result
  double element;  // largest error over the largest result
};

// float32: logits near 10 are rounded to 1e-6, and so much is a probability off, relative to
// itself; sums of some hundred terms add as much again. bfloat16: out and the probabilities are
// rounded to 2^-9 = 2e-3, where a result sums up many of them the errors average; a single element
// that hangs on few of them may be off by several times that.
Bounds bounds_of(DType stored) {
  return stored == DType::f32 ? Bounds{5e-6, 2e-5} : Bounds{6e-3, 1.5e-2};
}

// A key that is missed or seen twice moves a row of out by 1 / sqrt(keys) and more, far above these
// bounds. Values that cancel to nothing are measured against `scale` instead.
void expect_near(const DeviceProblem::Pair& pair,
                 const std::vector<double>& got,
                 const Bounds& bounds,
                 double scale) {
  const auto* want = pair.want->as<double>();
  double errors = 0.0;
  double norm = 0.0;
  double largest = scale;
  double worst = 0.0;
  std::size_t where = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = std::abs(got[i] - want[i]);
    if (!(error <= worst)) {
      worst = error;
      where = i;
    }
    largest = std::max(largest, std::abs(want[i]));
    errors += error * error;
    norm += want[i] * want[i];
  }
  if (got.empty()) {
    return;
  }
  const Shape& shape = pair.want->shape();
  const auto place = static_cast<std::int64_t>(where);
  const std::string at = fmt::format("{} {} element {} = row {} + {}: got {:.9g}, want {:.9g}",
                                     pair.name,
                                     to_string(shape),
                                     place,
                                     place / pair.want->view().row_size(),
                                     place % pair.want->view().row_size(),
                                     got[where],
                                     want[where]);
  EXPECT_LE(worst, bounds.element * largest) << at;
  EXPECT_LE(std::sqrt(errors),
            bounds.whole * std::sqrt(norm + scale * scale * static_cast<double>(got.size())))
      << at;
}

// Once with each choice of kernels; what may run Hopper's has a name of that kind.
class CudaSlidingAttention : public testing::TestWithParam<KernelChoice> {
 protected:
  void SetUp() override { set_kernel_choice(GetParam()); }

  void TearDown() override { set_kernel_choice(KernelChoice::automatic); }

  void expect_matches_cpu(const Layout& layout, DType stored, int shift) {
    SCOPED_TRACE(fmt::format("{} shift {} {}", name_of(stored), shift, layout.describe()));
    const Problem problem(memory_, layout, DType::f64);
    test::round_inputs(stored, problem);
    expect_matches_cpu(problem, stored, shift);
  }

  // The backward pass on the host reads the device's out: its rounding is no error of that pass.
  void expect_matches_cpu(const Problem& problem, DType stored, int shift) {
    CpuStream cpu;
    run(cpu, problem.forward());
    const DeviceProblem device(problem, stored, shift);
    device.run_both(stream_);
    const std::vector<std::vector<double>> got = device.downloads(stream_);
    const auto outputs = device.outputs();
    // lse is near 0 by chance; gradients of q and k vanish where a query sees one key alone.
    expect_near(outputs[0], got[0], bounds_of(stored), 0.1);
    expect_near(outputs[1], got[1], bounds_of(DType::f32), 1.0);
    std::ranges::copy(got[0], problem.out.as<double>());
    run(cpu, problem.backward());
    for (std::size_t i = 2; i < outputs.size(); ++i) {
      expect_near(outputs[i], got[i], bounds_of(stored), 0.1);
    }
  }

  // Every kernel family: float32, bfloat16 on tensor cores, bfloat16 off them.
  void expect_all_match_cpu(const Layout& layout) {
    expect_matches_cpu(layout, DType::f32, 0);
    expect_matches_cpu(layout, DType::bf16, 0);
    expect_matches_cpu(layout, DType::bf16, 3);
  }

  CudaStream stream_;
  Memory memory_;
};

INSTANTIATE_TEST_SUITE_P(Portable, CudaSlidingAttention, testing::Values(KernelChoice::portable));
INSTANTIATE_TEST_SUITE_P(Hopper, CudaSlidingAttention, testing::Values(KernelChoice::automatic));

Layout awkward_documents(std::int64_t window) {
  const std::int64_t w = std::min<std::int64_t>(window, 90);
  Layout layout;
  layout.documents = {1, w, w + 1, 63, 64, 65, 1, 1, 150};
  layout.window = window;
  layout.dim = 64;
  return layout;
}

TEST_P(CudaSlidingAttention, MatchesTheCpuOpAcrossDocumentsAndWindows) {
  for (const std::int64_t window : {std::int64_t{1},
                                    std::int64_t{2},
                                    std::int64_t{63},
                                    std::int64_t{64},
                                    std::int64_t{65},
                                    std::int64_t{128},
                                    kFull}) {
    Layout layout = awkward_documents(window);
    expect_all_match_cpu(layout);
    layout.has_sink = false;
    layout.pinned = 4;
    expect_all_match_cpu(layout);
  }
}

TEST_P(CudaSlidingAttention, MatchesTheCpuOpForEveryHeadWidthAndGroup) {
  for (const std::int64_t dim : {64, 128, 256}) {
    for (std::int64_t group = 1; group <= 8; ++group) {
      Layout layout;
      layout.documents = {70, 1, 130};
      layout.window = 65;
      layout.kv_heads = 1 + group % 2;
      layout.heads = group * layout.kv_heads;
      layout.dim = dim;
      layout.pinned = group == 3 || group == 4 ? 2 : 0;
      expect_matches_cpu(layout, DType::f32, 0);
      expect_matches_cpu(layout, DType::bf16, 0);
    }
  }
}

TEST_P(CudaSlidingAttention, MatchesTheCpuOpAtOtherHeadWidths) {
  for (const std::int64_t dim : {1, 6, 8, 40, 96, 160, 512}) {
    Layout layout;
    layout.documents = {20, 50};
    layout.window = 17;
    layout.dim = dim;
    layout.pinned = 3;
    expect_all_match_cpu(layout);
  }
}

TEST_P(CudaSlidingAttention, MatchesTheCpuOpAtTileEdges) {
  for (const std::int64_t tokens : {1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300}) {
    Layout layout;
    layout.documents = {tokens};
    layout.heads = 4;
    layout.kv_heads = 1;
    layout.dim = 128;
    expect_matches_cpu(layout, DType::bf16, 0);
    layout.window = 129;
    layout.pinned = 3;
    expect_matches_cpu(layout, DType::bf16, 0);
  }
}

TEST_P(CudaSlidingAttention, MatchesTheCpuOpWithHaloKeys) {
  for (const std::int64_t halo : {1, 5, 31, 64, 100, 150}) {
    Layout layout;
    layout.documents = {50, 60, 41, 90};
    layout.halo = halo;
    layout.window = 45;
    layout.dim = 64;
    layout.pinned = halo % 2 == 1 ? 4 : 0;
    expect_all_match_cpu(layout);
  }
}

// Where a window or the diagonal passes the corner of a tile by one key, which tiles and which
// masks begin and end there: 30 to 32 and 62 to 64 more than a multiple of every tile's size.
TEST_P(CudaSlidingAttention, MatchesTheCpuOpWhereWindowsPassCornersOfTiles) {
  for (const std::int64_t dim : {64, 128}) {
    for (const std::int64_t window : {31, 63, 127, 128, 158, 159, 160, 190, 191, 192, 193, 255}) {
      Layout layout;
      layout.documents = {400, 33};
      layout.window = window;
      layout.heads = 2;
      layout.kv_heads = 1;
      layout.dim = dim;
      expect_matches_cpu(layout, DType::bf16, 0);
    }
    for (const std::int64_t halo : {30, 31, 32, 62, 63, 64, 126, 127, 128}) {
      Layout layout;
      layout.documents = {330};
      layout.halo = halo;
      layout.heads = 4;
      layout.kv_heads = 1;
      layout.dim = dim;
      expect_matches_cpu(layout, DType::bf16, 0);
    }
  }
}

TEST_P(CudaSlidingAttention, MatchesTheCpuOpWithManyPinnedKeys) {
  Layout layout;
  layout.documents = {500, 300};
  layout.window = 3;
  layout.pinned = 200;
  layout.heads = 2;
  layout.kv_heads = 1;
  layout.dim = 64;
  expect_all_match_cpu(layout);
}

// Pinned keys that no query sees get zeros; ranges of neighbours need not touch.
TEST_P(CudaSlidingAttention, MatchesTheCpuOpWherePinnedRangesLieFarApart) {
  for (const DType stored : {DType::f32, DType::bf16}) {
    Layout layout;
    layout.documents = {20, 12, 30};
    layout.window = 2;
    layout.pinned = 200;
    layout.dim = 64;
    const Problem problem(memory_, layout, DType::f64);
    for (std::int64_t t = 20; t < 32; ++t) {
      problem.pinned_begin.as<std::int32_t>()[t] = 500;
      problem.pinned_end.as<std::int32_t>()[t] = 503;
    }
    for (std::int64_t t = 32; t < 62; ++t) {
      problem.pinned_begin.as<std::int32_t>()[t] = 7;  // an empty range beside one at the start
      problem.pinned_end.as<std::int32_t>()[t] = t % 3 == 0 ? 7 : 90;
    }
    test::round_inputs(stored, problem);
    expect_matches_cpu(problem, stored, 0);
  }
}

TEST_P(CudaSlidingAttention, MatchesTheCpuOpWithSinksNearAndFarFromTheLargestLogit) {
  for (const double mean : {-1e4, 0.0, 5.0, 7.0, 9.0, 12.0}) {
    Layout layout;
    layout.documents = {70, 130};
    layout.window = 64;
    layout.sink_mean = mean;
    layout.dim = 64;
    expect_all_match_cpu(layout);
  }
}

TEST_P(CudaSlidingAttention, SinkThatTakesAllGivesZero) {
  for (const DType stored : {DType::f32, DType::bf16}) {
    Layout layout;
    layout.sink_mean = 1000.0;
    layout.dim = 64;
    const Problem problem(memory_, layout, DType::f64);
    const DeviceProblem device(problem, stored, 0);
    device.run_both(stream_);
    for (const DeviceProblem::Pair& pair : device.outputs()) {
      if (std::string(pair.name) != "lse") {
        const double want = std::string(pair.name) == "d_sink" ? 0.5 : 0.0;
        const std::vector<double> got = pair.got->download(stream_);
        EXPECT_EQ(got, std::vector<double>(got.size(), want)) << pair.name;
      }
    }
  }
}

TEST_P(CudaSlidingAttention, WindowOfOneReturnsTheOwnValue) {
  for (const DType stored : {DType::f32, DType::bf16}) {
    Layout layout;
    layout.documents = {100};
    layout.window = 1;
    layout.has_sink = false;
    layout.dim = 64;
    const Problem problem(memory_, layout, DType::f64);
    const DeviceProblem device(problem, stored, 0);
    run(stream_, device.forward());
    const std::vector<double> out = device.out.download(stream_);
    const std::vector<double> v = device.v.download(stream_);
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::size_t row = i / 64;
      ASSERT_EQ(out[i], v[(row / 4 * 2 + row % 4 / 2) * 64 + i % 64]) << "element " << i;
    }
  }
}

TEST_P(CudaSlidingAttention, EmptyShardOverwritesGradientsOfItsHalo) {
  for (const DType stored : {DType::f32, DType::bf16}) {
    Layout layout;
    layout.documents = {80};
    layout.halo = 80;
    layout.pinned = 2;
    layout.dim = 64;
    const Problem problem(memory_, layout, DType::f64);
    const DeviceProblem device(problem, stored, 0);
    device.run_both(stream_);
    for (const DeviceTensor* x :
         {&device.d_k, &device.d_v, &device.d_pinned_k, &device.d_pinned_v}) {
      const std::vector<double> got = x->download(stream_);
      EXPECT_EQ(got, std::vector<double>(got.size(), 0.0));
    }
    const std::vector<double> d_sink = device.d_sink.download(stream_);
    EXPECT_EQ(d_sink, std::vector<double>(d_sink.size(), 0.5));
  }
}

TEST_P(CudaSlidingAttention, TheSinksGradientAloneHasTheSameBits) {
  for (const DType stored : {DType::f32, DType::bf16}) {
    Layout layout = awkward_documents(65);
    const Problem problem(memory_, layout, DType::f64);
    DeviceProblem device(problem, stored, 0);
    device.run_both(stream_);
    const std::vector<double> together = device.d_sink.download(stream_);
    device.fill(device.d_sink, 0.5);
    BIFOCAL_CUDA(cudaMemset(device.d_q.view().data, 0xff, device.d_q.view().bytes()));
    BIFOCAL_CUDA(cudaDeviceSynchronize());
    SlidingAttentionBackward alone = device.backward();
    alone.d_q = alone.d_k = alone.d_v = {};
    alone.check();
    run(stream_, alone);
    EXPECT_EQ(device.d_sink.download(stream_), together);
    EXPECT_TRUE(std::isnan(device.d_q.download(stream_)[0])) << "d_q was written";
  }
}

// A row of training's shape: many blocks at once, windows as trained.
TEST_P(CudaSlidingAttention, MatchesTheCpuOpOnALongerRow) {
  for (const std::int64_t window : {std::int64_t{448}, kFull}) {
    Layout layout;
    layout.documents = {700, 64, 1300};
    layout.window = window;
    layout.heads = 8;
    layout.kv_heads = 2;
    layout.dim = 128;
    layout.pinned = window == kFull ? 0 : 4;
    expect_matches_cpu(layout, DType::bf16, 0);
  }
}

// More tiles than a device has multiprocessors: a block takes several one after another, of
// different lengths.
Layout many_tiles(std::int64_t dim) {
  Layout layout;
  layout.documents = {1100, 90, 1, 1300, 700};
  layout.halo = 50;
  layout.window = 150;
  layout.heads = 24;
  layout.kv_heads = 8;
  layout.dim = dim;
  return layout;
}

TEST_P(CudaSlidingAttention, MatchesTheCpuOpWhereBlocksTakeSeveralTiles) {
  for (const std::int64_t dim : {64, 128}) {
    Layout layout = many_tiles(dim);
    expect_matches_cpu(layout, DType::bf16, 0);
    layout.pinned = 3;
    layout.window = 20;
    expect_matches_cpu(layout, DType::bf16, 0);
  }
}

TEST_P(CudaSlidingAttention, ManyTilesGiveTheSameBitsEveryTime) {
  for (const std::int64_t dim : {64, 128}) {
    const Problem problem(memory_, many_tiles(dim), DType::f64);
    DeviceProblem device(problem, DType::bf16, 0);
    std::vector<std::vector<double>> want;
    for (int repeat = 0; repeat < 20; ++repeat) {
      device.reset();
      device.run_both(stream_);
      const std::vector<std::vector<double>> got = device.downloads(stream_);
      if (repeat == 0) {
        want = got;
      }
      ASSERT_EQ(got, want) << "dim " << dim << " run " << repeat;
    }
  }
}

TEST_P(CudaSlidingAttention, AlternatingInputsGiveTheSameBitsEveryTime) {
  for (const DType stored : {DType::f32, DType::bf16}) {
    for (const std::int64_t dim : {64, 128, 256}) {
      Layout layout = awkward_documents(65);
      layout.dim = dim;
      layout.pinned = 4;
      const Problem first(memory_, layout, DType::f64);
      layout.documents.assign(1, layout.keys());
      const Problem second(memory_, layout, DType::f64);
      DeviceProblem devices[] = {DeviceProblem(first, stored, 0), DeviceProblem(second, stored, 0)};
      std::vector<std::vector<double>> want[2];
      for (int repeat = 0; repeat < 100; ++repeat) {
        DeviceProblem& device = devices[repeat % 2];
        device.reset();
        device.run_both(stream_);
        std::vector<std::vector<double>> got = device.downloads(stream_);
        if (repeat < 2) {
          want[repeat] = got;
          for (const std::vector<double>& values : got) {
            ASSERT_TRUE(std::ranges::all_of(values, [](double x) { return std::isfinite(x); }));
          }
        }
        ASSERT_EQ(got, want[repeat % 2]) << name_of(stored) << " dim " << dim << " run " << repeat;
      }
    }
  }
}

TEST_P(CudaSlidingAttention, RefusesWideHeadsAndStatisticsOfTheWrongType) {
  Layout layout;
  layout.documents = {3};
  layout.dim = 520;
  const Problem wide(memory_, layout, DType::f64);
  const DeviceProblem device(wide, DType::f32, 0);
  EXPECT_THROW(run(stream_, device.forward()), Error);
  layout.dim = 64;
  const Problem narrow(memory_, layout, DType::f64);
  const DeviceProblem half(narrow, DType::bf16, 0);
  SlidingAttentionForward forward = half.forward();
  forward.lse.dtype = DType::bf16;
  EXPECT_THROW(forward.check(), Error);
}

}  // namespace
}  // namespace bifocal
