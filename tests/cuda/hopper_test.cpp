// Each form of Hopper's products and copies against plain loops: what the attention kernels rely
// on. Values are small integers, so results are exact.
#include <cstdint>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "cuda/hopper_forms.h"
#include "kernels/cuda_check.h"
#include "kernels/tensor_map.h"
#include "support/fill.h"

namespace bifocal {
namespace {

using test::BoxCopy;
using test::DeviceTensor;
using test::kProductDepth;
using test::kProductRows;
using test::ProductForm;

class Hopper : public testing::Test {
 protected:
  void SetUp() override {
    if (!is_hopper()) {
      GTEST_SKIP() << "no device of compute capability 9.0";
    }
  }

  // Integers from -4 to 4 without a pattern.
  Tensor integers(const Shape& shape, std::uint64_t seed) {
    Tensor x = memory_.empty(Region::activations, DType::f64, shape);
    std::uint64_t state = seed * 0x9e3779b97f4a7c15ULL + 1;
    test::fill(x, [&](std::int64_t) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      return static_cast<double>((state >> 33U) % 9) - 4.0;
    });
    return x;
  }

  void expect_product(const ProductForm& form, int n) {
    SCOPED_TRACE(
        fmt::format("n {} a {} b {}",
                    n,
                    form.a_in_registers ? "registers" : (form.a_by_columns ? "columns" : "rows"),
                    form.b_by_columns ? "columns" : "rows"));
    const Tensor a = integers(
        form.a_by_columns ? Shape{kProductDepth, kProductRows} : Shape{kProductRows, kProductDepth},
        1);
    const Tensor b =
        integers(form.b_by_columns ? Shape{kProductDepth, n} : Shape{n, kProductDepth}, 2);
    const DeviceTensor d(DType::f32, {kProductRows, n}, 0);
    const DeviceTensor device_a = test::on_device(a, DType::bf16, 0);
    const DeviceTensor device_b = test::on_device(b, DType::bf16, 0);
    test::multiply_on_hopper(stream_,
                             form,
                             n,
                             d.view().as<float>(),
                             device_a.view().as<BFloat16>(),
                             device_b.view().as<BFloat16>());
    const std::vector<double> got = d.download(stream_);
    int wrong = 0;
    for (int row = 0; row < kProductRows; ++row) {
      for (int column = 0; column < n; ++column) {
        double want = 1.0;
        for (int k = 0; k < kProductDepth; ++k) {
          const int a_at = form.a_by_columns ? k * kProductRows + row : row * kProductDepth + k;
          const int b_at = form.b_by_columns ? k * n + column : column * kProductDepth + k;
          want += a.as<double>()[a_at] * b.as<double>()[b_at];
        }
        const double value = got[static_cast<std::size_t>(row * n + column)];
        if (value != want && ++wrong <= 4) {
          ADD_FAILURE() << fmt::format("d[{}, {}]: got {}, want {}", row, column, value, want);
        }
      }
    }
    EXPECT_EQ(wrong, 0) << "wrong elements";
  }

  void expect_products(const ProductForm& form) {
    for (const int n : {16, 32, 64, 96, 128, 192, 256}) {
      expect_product(form, n);
    }
  }

  // Calls function(place in the box, coordinates in the tensor, inside).
  template <class Function>
  static void for_each_in_box(const BoxCopy& c, const Function& function) {
    const int rows = c.box[1] * c.box[2] * c.box[3];
    for (int row = 0; row < rows; ++row) {
      const int y = row % c.box[1] + c.start[1];
      const int z = row / c.box[1] % c.box[2] + c.start[2];
      const int w = row / c.box[1] / c.box[2] + c.start[3];
      for (int column = 0; column < c.box[0]; ++column) {
        const int x = column + c.start[0];
        const int chunk = (column / 8) ^ (row % 8);
        const bool inside = x >= 0 && x < c.size[0] && y >= 0 && y < c.size[1] && z >= 0 &&
                            z < c.size[2] && w >= 0 && w < c.size[3];
        function(row * c.box[0] + chunk * 8 + column % 8,
                 ((w * c.size[2] + z) * c.size[1] + y) * c.size[0] + x,
                 inside);
      }
    }
  }

  void expect_load(const BoxCopy& copy) {
    SCOPED_TRACE(fmt::format("rank {} start {} {} {} {}",
                             copy.rank,
                             copy.start[0],
                             copy.start[1],
                             copy.start[2],
                             copy.start[3]));
    const std::int64_t size = copy.size[0] * copy.size[1] * copy.size[2] * copy.size[3];
    const std::int64_t box_size = copy.box[0] * copy.box[1] * copy.box[2] * copy.box[3];
    const Tensor x = integers({size}, 3);
    const DeviceTensor tensor = test::on_device(x, DType::bf16, 0);
    const DeviceTensor box(DType::bf16, {box_size}, 0);
    test::load_box_on_hopper(
        stream_, copy, box.view().as<BFloat16>(), tensor.view().as<BFloat16>());
    const std::vector<double> got = box.download(stream_);
    int wrong = 0;
    for_each_in_box(copy, [&](int place, std::int64_t at, bool inside) {
      const double want = inside ? x.as<double>()[at] : 0.0;
      if (got[static_cast<std::size_t>(place)] != want && ++wrong <= 4) {
        ADD_FAILURE() << fmt::format("element {} of the box: got {}, want {}",
                                     place,
                                     got[static_cast<std::size_t>(place)],
                                     want);
      }
    });
    EXPECT_EQ(wrong, 0) << "wrong elements";
  }

  CudaStream stream_;
  Memory memory_;
};

using HopperWgmma = Hopper;
using HopperCopy = Hopper;

TEST_F(HopperWgmma, MultipliesFactorsInSharedMemory) {
  expect_products({.a_in_registers = false, .a_by_columns = false, .b_by_columns = false});
}

TEST_F(HopperWgmma, MultipliesByATransposedRightFactor) {
  expect_products({.a_in_registers = false, .a_by_columns = false, .b_by_columns = true});
}

TEST_F(HopperWgmma, MultipliesATransposedLeftFactor) {
  expect_products({.a_in_registers = false, .a_by_columns = true, .b_by_columns = false});
}

TEST_F(HopperWgmma, MultipliesTwoTransposedFactors) {
  expect_products({.a_in_registers = false, .a_by_columns = true, .b_by_columns = true});
}

TEST_F(HopperWgmma, MultipliesALeftFactorInRegisters) {
  expect_products({.a_in_registers = true, .a_by_columns = false, .b_by_columns = false});
}

TEST_F(HopperWgmma, MultipliesALeftFactorInRegistersByATransposedOne) {
  expect_products({.a_in_registers = true, .a_by_columns = false, .b_by_columns = true});
}

TEST_F(HopperCopy, LoadsBoxesAndZerosBeyondTheTensor) {
  for (const int y : {-3, 0, 5, 17}) {
    expect_load(
        {.rank = 2, .size = {128, 20, 1, 1}, .box = {64, 16, 1, 1}, .start = {64, y, 0, 0}});
  }
  for (const int z : {-2, 0, 4, 10, 11}) {
    expect_load({.rank = 3, .size = {128, 6, 11, 1}, .box = {64, 3, 5, 1}, .start = {64, 3, z, 0}});
  }
  expect_load({.rank = 3, .size = {64, 1, 70, 1}, .box = {64, 1, 128, 1}, .start = {0, 0, 60, 0}});
  for (const int w : {0, 2}) {
    expect_load({.rank = 4, .size = {64, 3, 4, 3}, .box = {64, 2, 2, 2}, .start = {0, 1, 3, w}});
  }
}

TEST_F(HopperCopy, StoresBoxesWithinTheTensor) {
  for (const int z : {0, 4, 9}) {
    SCOPED_TRACE(fmt::format("z {}", z));
    const BoxCopy copy{
        .rank = 3, .size = {128, 6, 11, 1}, .box = {64, 3, 5, 1}, .start = {64, 3, z, 0}};
    const Tensor box = integers({64 * 3 * 5}, 4);
    const DeviceTensor device_box = test::on_device(box, DType::bf16, 0);
    const Tensor before = integers({128 * 6 * 11}, 5);
    const DeviceTensor tensor = test::on_device(before, DType::bf16, 0);
    test::store_box_on_hopper(
        stream_, copy, tensor.view().as<BFloat16>(), device_box.view().as<BFloat16>());
    std::vector<double> want(before.as<double>(), before.as<double>() + before.size());
    for_each_in_box(copy, [&](int place, std::int64_t at, bool inside) {
      if (inside) {
        want[static_cast<std::size_t>(at)] = box.as<double>()[place];
      }
    });
    EXPECT_EQ(tensor.download(stream_), want);
  }
}

TEST_F(HopperCopy, GoesThroughARingBetweenWarpgroups) {
  for (const int pieces : {1, 2, 3, 4, 7, 100}) {
    SCOPED_TRACE(pieces);
    const Tensor x = integers({pieces * 512}, 6);
    const DeviceTensor from = test::on_device(x, DType::bf16, 0);
    const DeviceTensor to(DType::bf16, {pieces * 512}, 0);
    test::copy_through_ring_on_hopper(
        stream_, to.view().as<BFloat16>(), from.view().as<BFloat16>(), pieces);
    EXPECT_EQ(to.download(stream_), from.download(stream_));
  }
}

}  // namespace
}  // namespace bifocal
