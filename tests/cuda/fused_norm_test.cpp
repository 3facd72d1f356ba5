// Pairs of ops in one pass on the device: the bits of the two ops, which other tests compare with
// the CPU.
#include "ops/fused_norm.h"

#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "kernels/cuda_stream.h"
#include "ops/elementwise.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::on_device;
using test::stored_normals;

TEST(CudaFusedNorm, AddRmsNormGivesTheBitsOfItsOps) {
  CudaStream stream;
  Memory memory;
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const Shape& shape : {Shape{1, 1},
                               Shape{9, 100},
                               Shape{131, 64},
                               Shape{33, 128},
                               Shape{35, 256},
                               Shape{7, 512},
                               Shape{3, 1024},
                               Shape{5, 2560},
                               Shape{3, 4096},
                               Shape{3, 5120},
                               Shape{0, 64}}) {
      const DeviceTensor a = on_device(stored_normals(memory, stored, shape, 1), stored, shift);
      const DeviceTensor b = on_device(stored_normals(memory, stored, shape, 2), stored, shift);
      const DeviceTensor weight =
          on_device(stored_normals(memory, stored, {shape[1]}, 3), stored, shift);
      const DeviceTensor want_y(stored, shape, shift);
      const DeviceTensor want_z(stored, shape, shift);
      run(stream, Add{want_y.view(), a.view(), b.view()});
      run(stream, RmsNormForward{want_z.view(), want_y.view(), weight.view(), 1e-5});
      const DeviceTensor y(stored, shape, shift);
      const DeviceTensor z(stored, shape, shift);
      AddRmsNorm op{y.view(), z.view(), a.view(), b.view(), weight.view(), 1e-5};
      op.check();
      run(stream, op);
      SCOPED_TRACE(fmt::format("{} shifted {}, {}", name_of(stored), shift, to_string(shape)));
      EXPECT_EQ(y.download(stream), want_y.download(stream));
      EXPECT_EQ(z.download(stream), want_z.download(stream));
      op.y = a.view();
      run(stream, op);
      EXPECT_EQ(a.download(stream), want_y.download(stream)) << "y over a";
      EXPECT_EQ(z.download(stream), want_z.download(stream)) << "y over a";
    }
  }
}

TEST(CudaFusedNorm, NormRopeGivesTheBitsOfItsOps) {
  CudaStream stream;
  Memory memory;
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const Shape& shape : {Shape{1, 1, 2},
                               Shape{5, 3, 32},
                               Shape{67, 8, 64},
                               Shape{9, 3, 64},
                               Shape{33, 32, 128},
                               Shape{3, 7, 128},
                               Shape{5, 4, 256},
                               Shape{3, 1, 256},
                               Shape{0, 2, 64}}) {
      const DeviceTensor x =
          on_device(stored_normals(memory, stored, shape, 1, 3.0), stored, shift);
      const DeviceTensor weight =
          on_device(stored_normals(memory, stored, {shape[2]}, 2), stored, shift);
      const Shape half{shape[0], shape[2] / 2};
      const DeviceTensor cos =
          on_device(stored_normals(memory, DType::f32, half, 3), DType::f32, 0);
      const DeviceTensor sin =
          on_device(stored_normals(memory, DType::f32, half, 4), DType::f32, 0);
      const Shape rows{shape[0] * shape[1], shape[2]};
      const DeviceTensor want(stored, shape, shift);
      run(stream,
          RmsNormForward{want.view().reshape(rows), x.view().reshape(rows), weight.view(), 1e-5});
      run(stream, RopeRotate{want.view(), cos.view(), sin.view()});
      const DeviceTensor y(stored, shape, shift);
      NormRope op{y.view(), x.view(), weight.view(), cos.view(), sin.view(), 1e-5};
      op.check();
      run(stream, op);
      SCOPED_TRACE(fmt::format("{} shifted {}, {}", name_of(stored), shift, to_string(shape)));
      EXPECT_EQ(y.download(stream), want.download(stream));
      op.y = x.view();
      run(stream, op);
      EXPECT_EQ(x.download(stream), want.download(stream)) << "in place";
    }
  }
}

}  // namespace
}  // namespace bifocal
