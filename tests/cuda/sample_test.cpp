// Drawing tokens on the device: the ids that the CPU op draws.
#include "ops/sample.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "kernels/cuda_stream.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::numbers_on_device;

struct Filter {
  double temperature;
  std::int64_t top_k;
  double top_p;
};

const Filter kFilters[] = {{0.0, 0, 1.0},
                           {1.0, 0, 1.0},
                           {0.6, 20, 0.95},
                           {1.0, 1, 1.0},
                           {1.3, 40, 1.0},
                           {2.0, 0, 0.5},
                           {1.0, 0, 0.999999},
                           {0.7, 1000000, 0.9},
                           {1.0, 3, 0.1},
                           {100.0, 0, 0.75}};

// Rows of logits: normals; few different ones, so that many tie; all equal; one that rules.
std::vector<float> make_logits(Memory& memory, DType stored, std::int64_t rows, std::int64_t size) {
  const Tensor normals = test::stored_normals(memory, stored, {rows, size}, 3, 3.0);
  std::vector<float> logits;
  for (std::int64_t i = 0; i < rows * size; ++i) {
    auto x = static_cast<float>(normals.as<double>()[i]);
    switch (i / size % 4) {
      case 1:
        x = std::round(x);
        break;
      case 2:
        x = -1.5F;
        break;
      case 3:
        x = i % size == size / 2 ? 60.0F : (i % 7 == 0 ? -0.0F : 0.0F);
        break;
      default:
        break;
    }
    logits.push_back(x);
  }
  if (size > 2) {
    logits[1] = -std::numeric_limits<float>::infinity();
  }
  return logits;
}

// Numbers of sequences far apart, and places in their answers.
struct Counters {
  std::vector<std::int64_t> streams, indices;

  Counters(std::int64_t rows, std::int64_t round) {
    for (std::int64_t row = 0; row < rows; ++row) {
      streams.push_back((row + 1) * 0x123456789abcdefLL);
      indices.push_back(row * 3 + round);
    }
  }
};

// Sums of the CPU and of the device differ by 1e-12 of the whole: no draw of these lies so near the
// border between two ids.
void expect_same_ids(CudaStream& stream, DType stored, std::int64_t rows, std::int64_t size) {
  Memory memory;
  CpuStream cpu;
  const std::vector<float> logits = make_logits(memory, stored, rows, size);
  const Shape shape{rows, size};
  std::vector<double> doubles(logits.begin(), logits.end());
  DeviceTensor device_logits(stored, shape, size % 2 == 0 ? 0 : 1);
  device_logits.upload({doubles.data(), DType::f64, shape});
  for (const Filter& filter : kFilters) {
    for (std::int64_t round = 0; round < (size > 10000 ? 4 : 20); ++round) {
      const Counters counters(rows, round);
      std::vector<std::int32_t> want(static_cast<std::size_t>(rows));
      Sample op{.ids = {want.data(), DType::i32, {rows}},
                .logits = {logits.data(), DType::f32, shape},
                .temperature = filter.temperature,
                .top_k = filter.top_k,
                .top_p = filter.top_p,
                .seed = 77,
                .streams = {counters.streams.data(), DType::i64, {rows}},
                .indices = {counters.indices.data(), DType::i64, {rows}}};
      run(cpu, op);
      const DeviceTensor ids(DType::i32, {rows}, 0);
      const DeviceTensor streams = numbers_on_device(counters.streams);
      const DeviceTensor indices = numbers_on_device(counters.indices);
      op.ids = ids.view();
      op.logits = device_logits.view();
      op.streams = streams.view();
      op.indices = indices.view();
      op.check();
      run(stream, op);
      const std::vector<double> got = ids.download(stream);
      for (std::size_t row = 0; row < got.size(); ++row) {
        ASSERT_EQ(got[row], want[row])
            << name_of(stored) << " row " << row << " of " << rows << ", vocabulary " << size
            << ", temperature " << filter.temperature << ", top_k " << filter.top_k << ", top_p "
            << filter.top_p << ", round " << round;
      }
    }
  }
}

TEST(CudaSample, DrawsTheIdsOfTheCpuOp) {
  CudaStream stream;
  for (const DType stored : {DType::f32, DType::bf16}) {
    for (const std::int64_t size : {1, 2, 5, 63, 64, 65, 1000, 4099}) {
      expect_same_ids(stream, stored, 8, size);
    }
  }
}

TEST(CudaSample, DrawsTheIdsOfTheCpuOpFromAWholeVocabulary) {
  CudaStream stream;
  expect_same_ids(stream, DType::f32, 4, 151936);
}

TEST(CudaSample, RowOfNaNGivesTheFirstIdAndLeavesItsNeighboursAlone) {
  CudaStream stream;
  constexpr std::int64_t kRows = 3;
  constexpr std::int64_t kSize = 1000;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  std::vector<double> logits(kSize, nan);
  logits.resize(kRows * kSize, 0.0);
  logits[kSize + 7] = 90.0;      // rules its row
  logits[2 * kSize + 9] = 90.0;  // would, but for the NaN
  logits[2 * kSize + 5] = nan;
  DeviceTensor device_logits(DType::f32, {kRows, kSize}, 0);
  device_logits.upload({logits.data(), DType::f64, {kRows, kSize}});
  const Counters counters(kRows, 0);
  const DeviceTensor streams = numbers_on_device(counters.streams);
  const DeviceTensor indices = numbers_on_device(counters.indices);
  for (const Filter& filter : kFilters) {
    if (filter.temperature > 1.0) {
      continue;  // 90 does not rule
    }
    const DeviceTensor ids(DType::i32, {kRows}, 0);
    run(stream,
        Sample{.ids = ids.view(),
               .logits = device_logits.view(),
               .temperature = filter.temperature,
               .top_k = filter.top_k,
               .top_p = filter.top_p,
               .seed = 5,
               .streams = streams.view(),
               .indices = indices.view()});
    EXPECT_EQ(ids.download(stream), (std::vector<double>{0, 7, 5}))
        << "temperature " << filter.temperature << ", top_k " << filter.top_k << ", top_p "
        << filter.top_p;
  }
}

// Shows what equality with the CPU op cannot: that both are right.
TEST(CudaSample, FrequenciesFollowTheSoftmax) {
  CudaStream stream;
  constexpr std::int64_t kRows = 40000;
  const double logits[] = {0.0, 1.0, -1.0, 2.0};
  std::vector<double> all;
  std::vector<std::int64_t> streams;
  std::vector<std::int64_t> indices;
  for (std::int64_t row = 0; row < kRows; ++row) {
    all.insert(all.end(), std::begin(logits), std::end(logits));
    streams.push_back(5);
    indices.push_back(row);
  }
  DeviceTensor device_logits(DType::f32, {kRows, 4}, 0);
  device_logits.upload({all.data(), DType::f64, {kRows, 4}});
  const DeviceTensor ids(DType::i32, {kRows}, 0);
  const DeviceTensor device_streams = numbers_on_device(streams);
  const DeviceTensor device_indices = numbers_on_device(indices);
  run(stream,
      Sample{.ids = ids.view(),
             .logits = device_logits.view(),
             .temperature = 0.7,
             .seed = 11,
             .streams = device_streams.view(),
             .indices = device_indices.view()});
  double counts[4] = {};
  for (const double id : ids.download(stream)) {
    ASSERT_TRUE(id >= 0 && id < 4) << id;
    counts[static_cast<int>(id)] += 1.0;
  }
  double sum = 0.0;
  for (const double logit : logits) {
    sum += std::exp(logit / 0.7);
  }
  for (int i = 0; i < 4; ++i) {
    const double p = std::exp(logits[i] / 0.7) / sum;
    EXPECT_NEAR(counts[i], kRows * p, 4.5 * std::sqrt(kRows * p * (1.0 - p))) << "id " << i;
  }
}

}  // namespace
}  // namespace bifocal
