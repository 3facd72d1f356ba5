// The distance of stage 1 on the device against its CPU op in double.
#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "kernels/cuda_stream.h"
#include "ops/distill_loss.h"
#include "support/compare.h"
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

class CudaAlignLoss : public testing::Test {
 protected:
  Memory memory_;
  CpuStream cpu_;
  CudaStream stream_;
};

TEST_F(CudaAlignLoss, MatchesTheCpuOp) {
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const Shape& shape : {Shape{0, 2, 8},
                               Shape{1, 1, 1},
                               Shape{31, 3, 7},
                               Shape{1500, 4, 16},
                               Shape{70, 32, 128}}) {
      SCOPED_TRACE(fmt::format("{} shifted {} {}", name_of(stored), shift, to_string(shape)));
      const std::int64_t tokens = shape[0];
      const Tensor student = stored_normals(memory_, stored, shape, 1);
      const Tensor teacher = stored_normals(memory_, stored, shape, 2);
      const Tensor keep = memory_.empty(Region::loss, DType::u8, {tokens});
      test::fill(keep, [](std::int64_t t) { return t % 3 == 1 ? 0.0 : 1.0; });
      const Tensor want = memory_.empty(Region::loss, DType::f64, shape);
      const Tensor want_sums = test::tensor_of<double>(memory_, {1.0, 2.0});
      const DeviceTensor sums = copied_to_device(want_sums);
      run(cpu_, AlignLoss{want, want_sums, student, teacher, keep});
      const DeviceTensor d_student(stored, shape, shift);
      const DeviceTensor device_student = on_device(student, stored, shift);
      const DeviceTensor device_teacher = on_device(teacher, stored, shift);
      const DeviceTensor device_keep = copied_to_device(keep);
      AlignLoss op{d_student.view(),
                   sums.view(),
                   device_student.view(),
                   device_teacher.view(),
                   device_keep.view()};
      op.check();
      run(stream_, op);
      // Squares of up to eight float32 numbers are added in float32.
      EXPECT_CLOSE(sums.download(stream_), want_sums, 10.0 * test::kRoundoff);
      test::expect_close(d_student.download(stream_), want, stored, 1.0);
      const DeviceTensor again = copied_to_device(test::tensor_of<double>(memory_, {1.0, 2.0}));
      op.sums = again.view();
      op.d_student = {};
      run(stream_, op);
      EXPECT_EQ(again.download(stream_), sums.download(stream_));
    }
  }
}

}  // namespace
}  // namespace bifocal
