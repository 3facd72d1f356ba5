// Times of ops on the device, as a table. Skipped unless the environment has BIFOCAL_SPEED=1.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include <cuda_runtime.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/random.h"
#include "cuda/device_tensor.h"
#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"

namespace bifocal::test {

// A row of the shape of Qwen3-4B.
inline constexpr std::int64_t kSpeedTokens = 40960;
inline constexpr std::int64_t kSpeedHidden = 2560;
inline constexpr std::int64_t kSpeedHeads = 32;
inline constexpr std::int64_t kSpeedKvHeads = 8;
inline constexpr std::int64_t kSpeedHeadDim = 128;
inline constexpr std::int64_t kSpeedIntermediate = 9728;

// Normals times `deviation` plus `mean`, or their absolute values. A pattern of a quarter of a
// million numbers fills the tensor again and again: times do not depend on its length.
inline DeviceTensor speed_tensor(DType dtype,
                                 const Shape& shape,
                                 std::uint64_t seed,
                                 double deviation = 1.0,
                                 double mean = 0.0,
                                 bool positive = false) {
  constexpr std::int64_t kPattern = 250007;  // a prime, so that rows differ
  DeviceTensor tensor(dtype, shape, 0);
  const std::int64_t count = std::min(kPattern, shape.size());
  std::vector<std::byte> host(static_cast<std::size_t>(count) * size_of(dtype));
  for (std::int64_t i = 0; i < count; ++i) {
    double x = mean + deviation * random_normal(seed, 0, static_cast<std::uint64_t>(i));
    x = positive ? std::abs(x) : x;
    std::byte* to = host.data() + static_cast<std::size_t>(i) * size_of(dtype);
    if (dtype == DType::bf16) {
      const BFloat16 value = to_bfloat16(static_cast<float>(x));
      std::memcpy(to, &value, sizeof(value));
    } else {
      const auto value = static_cast<float>(x);
      std::memcpy(to, &value, sizeof(value));
    }
  }
  auto* data = static_cast<std::byte*>(tensor.view().data);
  const std::size_t total = tensor.view().bytes();
  BIFOCAL_CUDA(cudaMemcpy(data, host.data(), host.size(), cudaMemcpyHostToDevice));
  for (std::size_t filled = host.size(); filled < total;) {
    const std::size_t part = std::min(filled, total - filled);
    BIFOCAL_CUDA(cudaMemcpy(data + filled, data, part, cudaMemcpyDeviceToDevice));
    filled += part;
  }
  BIFOCAL_CUDA(cudaDeviceSynchronize());
  return tensor;
}

// Milliseconds of one call: the median of ten after three for warming up. What takes less than a
// millisecond is called several times between two events.
template <class Function>
double median_ms(CudaStream& stream, const Function& function) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  BIFOCAL_CUDA(cudaEventCreate(&begin));
  BIFOCAL_CUDA(cudaEventCreate(&end));
  const auto time = [&](int calls) {
    BIFOCAL_CUDA(cudaEventRecord(begin, stream.handle()));
    for (int i = 0; i < calls; ++i) {
      function();
    }
    BIFOCAL_CUDA(cudaEventRecord(end, stream.handle()));
    BIFOCAL_CUDA(cudaEventSynchronize(end));
    float ms = 0.0F;
    BIFOCAL_CUDA(cudaEventElapsedTime(&ms, begin, end));
    return static_cast<double>(ms) / calls;
  };
  time(1);
  time(1);
  const double once = time(1);
  const int calls = once < 1.0 ? static_cast<int>(std::ceil(1.0 / std::max(once, 0.02))) : 1;
  std::vector<double> all(10);
  std::ranges::generate(all, [&] { return time(calls); });
  std::ranges::sort(all);
  BIFOCAL_CUDA(cudaEventDestroy(begin));
  BIFOCAL_CUDA(cudaEventDestroy(end));
  return (all[4] + all[5]) / 2.0;
}

// Skips its tests unless asked for, and prints a line for each op. `bytes` and `flop` are what the
// op must move and compute; 0 leaves a column empty.
class CudaSpeed : public testing::Test {
 protected:
  void SetUp() override {
    const char* wanted = std::getenv("BIFOCAL_SPEED");
    if (wanted == nullptr || std::string_view(wanted) != "1") {
      GTEST_SKIP() << "set BIFOCAL_SPEED=1 to time ops";
    }
  }

  template <class Function>
  void measure(const std::string& name, double bytes, double flop, const Function& function) {
    const double ms = median_ms(stream_, function);
    std::string line = fmt::format("speed  {:<44} {:>9.4f} ms", name, ms);
    line += bytes > 0.0 ? fmt::format(" {:>7.3f} TB/s", bytes / ms * 1e-9) : std::string(13, ' ');
    line += flop > 0.0 ? fmt::format(" {:>7.1f} TFLOP/s", flop / ms * 1e-9) : std::string();
    std::puts(line.c_str());
    std::fflush(stdout);
    EXPECT_GT(ms, 0.0);
  }

  template <class Op>
  void measure_op(const std::string& name, double bytes, double flop, const Op& op) {
    op.check();
    measure(name, bytes, flop, [&] { run(stream_, op); });
  }

  CudaStream stream_;
};

}  // namespace bifocal::test
