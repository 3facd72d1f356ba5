// Products of a few rows with Hopper's kernels against the portable ones.
#include <cmath>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "cuda/speed.h"
#include "kernels/cuda_stream.h"
#include "kernels/kernel_choice.h"
#include "ops/decode_layer.h"

namespace bifocal {
namespace {

using test::DeviceTensor;

// More outputs for each block than its ring holds, at every number of pieces of a row: against the
// portable kernels. Nine rows are eight and one, or twice four and one; a row has the same bits
// whatever shares its launch, and whenever it runs.
TEST(HopperDecodeProducts, ManyOutputsAgreeWithThePortableKernels) {
  constexpr std::int64_t kOut = 6100;
  constexpr std::int64_t kRows = 9;
  CudaStream stream;
  for (const std::int64_t in : {96, 2560, 4096, 9216, 9728}) {
    const DeviceTensor x = test::speed_tensor(DType::bf16, {kRows, in}, 1);
    const DeviceTensor norm = test::speed_tensor(DType::bf16, {in}, 2);
    const DeviceTensor first = test::speed_tensor(DType::bf16, {kOut, in}, 3, 0.02);
    const DeviceTensor second = test::speed_tensor(DType::bf16, {kOut, in}, 4, 0.02);
    const auto products_of = [&](KernelChoice choice) {
      set_kernel_choice(choice);
      // Made anew, so that an output that nobody takes is seen.
      const DeviceTensor y(DType::f32, {kRows, kOut}, 0);
      const DeviceTensor gated(DType::bf16, {kRows, kOut}, 0);
      const std::int64_t left = kOut / 3;
      std::vector<double> all;
      for (const std::int64_t rows : {1, 2, 9}) {
        const DecodeProduct product{.y = y.view().rows(0, rows), .weight = first.view()};
        run(stream,
            DecodeProducts{
                .products = {&product, 1}, .x = x.view().rows(0, rows), .norm = norm.view()});
        const std::vector<double> values = y.download(stream);
        all.insert(all.end(), values.begin(), values.begin() + rows * kOut);
      }
      // Parts that meet inside a stage.
      const TensorView row = y.view().rows(0, 1).reshape({kOut});
      const DecodeProduct parts[] = {
          {.y = row.rows(0, left).reshape({1, left}), .weight = first.view().rows(0, left)},
          {.y = row.rows(left, kOut).reshape({1, kOut - left}),
           .weight = second.view().rows(left, kOut)}};
      run(stream, DecodeProducts{.products = parts, .x = x.view().rows(0, 1)});
      run(stream,
          DecodeGatedProduct{.y = gated.view(),
                             .x = x.view(),
                             .norm = norm.view(),
                             .gate = first.view(),
                             .up = second.view()});
      const std::vector<double> joined = y.download(stream);
      all.insert(all.end(), joined.begin(), joined.begin() + kOut);
      const std::vector<double> activations = gated.download(stream);
      all.insert(all.end(), activations.begin(), activations.end());
      set_kernel_choice(KernelChoice::automatic);
      return all;
    };
    const std::vector<double> want = products_of(KernelChoice::portable);
    const std::vector<double> got = products_of(KernelChoice::automatic);
    ASSERT_EQ(got.size(), want.size());
    // Inputs that round the other way after the norm move a sum by 2^-8 of a term each; outputs of
    // the gated product are rounded besides.
    const double size = 0.02 * std::sqrt(static_cast<double>(in));
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i], want[i], 0.01 * (size + std::abs(want[i])))
          << "in " << in << " number " << i;
    }
    for (std::size_t i = 0; i < kOut; ++i) {
      ASSERT_EQ(got[i], got[i + kOut]) << "in " << in << " output " << i << ", one row against two";
      ASSERT_EQ(got[i], got[i + 3 * kOut]) << "in " << in << " output " << i << ", against nine";
    }
    for (int i = 0; i < 20; ++i) {
      ASSERT_EQ(products_of(KernelChoice::automatic), got) << "in " << in << " time " << i;
    }
  }
}

}  // namespace
}  // namespace bifocal
