// Fills on the device against their CPU op.
#include "ops/fill.h"

#include <cmath>

#include <gtest/gtest.h>

#include "core/random.h"
#include "cuda/device_tensor.h"
#include "kernels/cuda_stream.h"

namespace bifocal {
namespace {

using test::DeviceTensor;

TEST(CudaFill, WritesTheRoundedValueEverywhere) {
  CudaStream stream;
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const std::int64_t size : {0, 1, 4, 7, 8, 9, 2049, 10007}) {
      const DeviceTensor x(stored, {size}, shift);
      run(stream, Fill{x.view(), 1.0 / 3.0});
      for (const double value : x.download(stream)) {
        ASSERT_EQ(value, test::rounded(stored, 1.0 / 3.0)) << name_of(stored) << " size " << size;
      }
    }
  }
}

// The same numbers as the host's, whatever is cut. Elementary functions may differ in the last bits
// of a double; where that crosses a midpoint of the type, by one unit in the type's last place.
TEST(CudaFill, NormalsAreTheHosts) {
  CudaStream stream;
  constexpr std::int64_t kSize = 100003;
  constexpr std::uint64_t kBegin = (1ULL << 34U) + 5;
  for (const auto& [stored, shift] : test::device_cases()) {
    const DeviceTensor x(stored, {kSize}, shift);
    run(stream, FillNormal{x.view(), 11, stream_of("a.weight"), kBegin, 0.02});
    const std::vector<double> got = x.download(stream);
    std::int64_t different = 0;
    for (std::int64_t i = 0; i < kSize; ++i) {
      const std::uint64_t index = kBegin + static_cast<std::uint64_t>(i);
      const double exact = 0.02 * random_normal(11, stream_of("a.weight"), index);
      const double want = test::rounded(stored, exact);
      const double value = got[static_cast<std::size_t>(i)];
      const double last_place = std::abs(want) * (stored == DType::bf16 ? 1.0 / 128 : 1.2e-7);
      ASSERT_LE(std::abs(value - want), last_place)
          << name_of(stored) << " element " << i << ": got " << value << ", want " << want;
      different += value == want ? 0 : 1;
    }
    EXPECT_LE(different, 2) << name_of(stored);

    const DeviceTensor cut(stored, {kSize}, shift);
    for (const auto& [begin, end] : {std::pair{0, 1001}, {1001, 1002}, {1002, 100003}}) {
      run(stream,
          FillNormal{cut.view().rows(begin, end),
                     11,
                     stream_of("a.weight"),
                     kBegin + static_cast<std::uint64_t>(begin),
                     0.02});
    }
    EXPECT_EQ(cut.download(stream), got) << "in parts";
  }
}

}  // namespace
}  // namespace bifocal
