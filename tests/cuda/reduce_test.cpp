// Sums on the device against sums in double.
#include "ops/reduce.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "kernels/cuda_stream.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::numbers_on_device;
using test::on_device;
using test::stored_normals;

double squares(CudaStream& stream, const DeviceTensor& x, double before) {
  const DeviceTensor sum = numbers_on_device<double>({before});
  const SumOfSquares op{sum.view(), x.view()};
  op.check();
  run(stream, op);
  return sum.download(stream)[0];
}

// Sizes around a vector, a block and a thousand parts, and one where each thread loops.
TEST(CudaReduce, SquaresMatchASumInDoubleAndAdd) {
  CudaStream stream;
  Memory memory;
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const std::int64_t size : {0, 1, 3, 4, 7, 8, 9, 255, 4096, 8449, 1000003, 5000011}) {
      const Tensor x = stored_normals(memory, stored, {size}, 1, 30.0);
      double want = 3.0;
      for (std::int64_t i = 0; i < size; ++i) {
        want += x.as<double>()[i] * x.as<double>()[i];
      }
      // Squares of float32 are exact in double; the sums differ in their order alone.
      EXPECT_NEAR(squares(stream, on_device(x, stored, shift), 3.0), want, 1e-12 * want)
          << name_of(stored) << " shifted " << shift << ", size " << size;
    }
  }
}

TEST(CudaReduce, ShowsNanAndInfinityAndHoldsSquaresBeyondFloat) {
  CudaStream stream;
  Memory memory;
  const Tensor x = stored_normals(memory, DType::f32, {9000}, 1);
  x.as<double>()[3] = test::rounded(DType::f32, 1e30);
  EXPECT_NEAR(squares(stream, on_device(x, DType::f32, 0), 0.0), 1e60, 1e54);
  x.as<double>()[8999] = std::numeric_limits<double>::infinity();
  EXPECT_TRUE(std::isinf(squares(stream, on_device(x, DType::f32, 0), 0.0)));
  x.as<double>()[100] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(std::isnan(squares(stream, on_device(x, DType::f32, 0), 0.0)));
}

TEST(CudaReduce, AlternatingInputsGiveTheSameBitsEveryTime) {
  CudaStream stream;
  Memory memory;
  const DeviceTensor x[] = {
      on_device(stored_normals(memory, DType::f32, {3000017}, 10), DType::f32, 0),
      on_device(stored_normals(memory, DType::f32, {70001}, 11), DType::f32, 1)};
  double first[2] = {};
  for (int repeat = 0; repeat < 100; ++repeat) {
    const int which = repeat % 2;
    const double got = squares(stream, x[which], 0.0);
    first[which] = repeat < 2 ? got : first[which];
    ASSERT_EQ(got, first[which]) << "repeat " << repeat;
  }
}

TEST(CudaReduce, KeptSumTakesWhatIsKept) {
  CudaStream stream;
  CpuStream cpu;
  for (const std::int64_t size : {0, 1, 31, 1023, 1024, 1025, 40960}) {
    std::vector<double> x;
    std::vector<std::uint8_t> keep;
    for (std::int64_t i = 0; i < size; ++i) {
      const bool kept = i % 3 != 1;
      x.push_back(kept ? std::sin(static_cast<double>(i))
                       : std::numeric_limits<double>::quiet_NaN());
      keep.push_back(kept ? static_cast<std::uint8_t>(1 + i % 2) : 0);
    }
    double want = 0.25;
    run(cpu,
        KeptSum{{&want, DType::f64, {1}},
                {x.data(), DType::f64, {size}},
                {keep.data(), DType::u8, {size}}});
    const DeviceTensor device_x = numbers_on_device(x);
    const DeviceTensor device_keep = numbers_on_device(keep);
    const DeviceTensor sum = numbers_on_device<double>({0.25});
    const KeptSum op{sum.view(), device_x.view(), device_keep.view()};
    op.check();
    run(stream, op);
    EXPECT_NEAR(sum.download(stream)[0], want, 1e-11) << "size " << size;
  }
}

}  // namespace
}  // namespace bifocal
