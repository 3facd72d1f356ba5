// Add, Zero and Cast on the device against their CPU ops in double.
#include "ops/elementwise.h"

#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::on_device;
using test::stored_normals;

// One element, and one less and more than a vector and than a block of vectors; a prime.
constexpr std::int64_t kSizes[] = {1, 3, 4, 5, 7, 8, 9, 1023, 1024, 1025, 2047, 2048, 2049, 10007};

TEST(CudaElementwise, AddMatchesTheCpuOp) {
  CudaStream stream;
  CpuStream cpu;
  Memory memory;
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const std::int64_t size : kSizes) {
      const Tensor a = stored_normals(memory, stored, {size}, 1);
      const Tensor b = stored_normals(memory, stored, {size}, 2);
      const Tensor want = memory.empty(Region::activations, DType::f64, {size});
      run(cpu, Add{want, a, b});
      const DeviceTensor device_a = on_device(a, stored, shift);
      const DeviceTensor device_b = on_device(b, stored, shift);
      const DeviceTensor y(stored, {size}, shift);
      run(stream, Add{y.view(), device_a.view(), device_b.view()});
      // One rounding; the second covers the double sum's own.
      test::expect_close(y.download(stream), want, stored, 2);
      run(stream, Add{device_a.view(), device_a.view(), device_b.view()});
      EXPECT_EQ(device_a.download(stream), y.download(stream)) << "y over a, size " << size;
    }
  }
}

TEST(CudaElementwise, ZeroClearsWhateverTheTensorHeld) {
  CudaStream stream;
  Memory memory;
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const std::int64_t size : kSizes) {
      const Tensor x = stored_normals(memory, stored, {size}, 3);
      const DeviceTensor device_x = on_device(x, stored, shift);
      run(stream, Zero{device_x.view()});
      for (const double value : device_x.download(stream)) {
        ASSERT_EQ(value, 0.0);
      }
    }
  }
}

TEST(CudaElementwise, CastRoundsToNearestEven) {
  CudaStream stream;
  Memory memory;
  for (const DType from : {DType::f32, DType::bf16}) {
    for (const auto& [to, shift] : test::device_cases()) {
      for (const std::int64_t size : kSizes) {
        const Tensor x = stored_normals(memory, from, {size}, 4);
        const double* values = x.as<double>();
        if (size >= 4) {
          // Midpoints between neighbouring bfloat16: to even, which is down, then up.
          x.as<double>()[0] = test::rounded(from, 1.0 + 1.0 / 256);
          x.as<double>()[1] = test::rounded(from, 1.0 + 3.0 / 256);
        }
        const DeviceTensor device_x = on_device(x, from, shift);
        const DeviceTensor y(to, {size}, shift);
        run(stream, Cast{y.view(), device_x.view()});
        const std::vector<double> got = y.download(stream);
        for (std::size_t i = 0; i < got.size(); ++i) {
          ASSERT_EQ(got[i], test::rounded(to, values[i])) << "element " << i << " of " << size;
        }
      }
    }
  }
}

TEST(CudaElementwise, OtherTypesAreRefused) {
  CudaStream stream;
  const TensorView x{nullptr, DType::f64, {4}};
  const TensorView y{nullptr, DType::f32, {4}};
  EXPECT_THROW(run(stream, Cast{y, x}), Error);
  EXPECT_THROW(run(stream, Add{y, x, y}), Error);
}

TEST(CudaElementwise, EmptyTensorsAreNoWork) {
  CudaStream stream;
  const TensorView x{nullptr, DType::f32, {0}};
  run(stream, Zero{x});
  stream.synchronize();
}

TEST(CudaCheck, AFailedCallNamesItselfAndLeavesNoErrorBehind) {
  try {
    BIFOCAL_CUDA(cudaSetDevice(-1));
    FAIL() << "device -1 was accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("cudaSetDevice(-1)"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace bifocal
