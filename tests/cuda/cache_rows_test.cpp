// Copies of rows in and out of caches on the device.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "kernels/cuda_stream.h"
#include "ops/decode_attention.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::numbers_on_device;
using test::on_device;
using test::stored_normals;

TEST(CudaCache, WritesAndReadsRowsTheLastOfASlotStays) {
  CudaStream stream;
  Memory memory;
  const std::vector<std::int32_t> write_slots{3, 0, 3, 8, 5, 0, 3};
  const std::vector<std::int32_t> read_slots{8, 3, 3, 1, 0};
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const std::int64_t width : {1, 7, 64, 1024}) {
      const Tensor cache = stored_normals(memory, stored, {9, width}, 1);
      const Tensor rows = stored_normals(memory, stored, {7, width}, 2);
      const DeviceTensor device_cache = on_device(cache, stored, shift);
      const DeviceTensor device_rows = on_device(rows, stored, shift);
      const DeviceTensor write_ints = numbers_on_device(write_slots);
      const DeviceTensor read_ints = numbers_on_device(read_slots);
      const DeviceTensor read(stored, {5, width}, shift);
      const CacheWrite write{device_cache.view(), device_rows.view(), write_ints.view()};
      write.check();
      run(stream, write);
      const CacheRead op{read.view(), device_cache.view(), read_ints.view()};
      op.check();
      run(stream, op);
      std::vector<double> want(cache.as<double>(), cache.as<double>() + cache.size());
      for (std::size_t i = 0; i < write_slots.size(); ++i) {
        std::copy_n(rows.as<double>() + static_cast<std::int64_t>(i) * width,
                    width,
                    want.begin() + write_slots[i] * width);
      }
      const std::vector<double> got = read.download(stream);
      EXPECT_EQ(device_cache.download(stream), want);
      for (std::size_t i = 0; i < read_slots.size(); ++i) {
        for (std::int64_t j = 0; j < width; ++j) {
          ASSERT_EQ(got[i * static_cast<std::size_t>(width) + static_cast<std::size_t>(j)],
                    want[static_cast<std::size_t>(read_slots[i] * width + j)]);
        }
      }
    }
  }
}

TEST(CudaCache, SlotsOutsideWriteNothingAndReadZeros) {
  CudaStream stream;
  Memory memory;
  constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min();
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  const std::vector<std::int32_t> slots{-1, 4, 9, kLeast, 0, kMost, 10};
  for (const auto& [stored, shift] : test::device_cases()) {
    for (const std::int64_t width : {1, 7, 64, 1024}) {
      const Tensor cache = stored_normals(memory, stored, {9, width}, 1);
      const Tensor rows = stored_normals(memory, stored, {7, width}, 2);
      const DeviceTensor device_cache = on_device(cache, stored, shift);
      const DeviceTensor device_rows = on_device(rows, stored, shift);
      const DeviceTensor device_slots = numbers_on_device(slots);
      const DeviceTensor read = on_device(rows, stored, shift);  // so that zeros must be written
      run(stream, CacheWrite{device_cache.view(), device_rows.view(), device_slots.view()});
      run(stream, CacheRead{read.view(), device_cache.view(), device_slots.view()});
      std::vector<double> want(cache.as<double>(), cache.as<double>() + cache.size());
      std::vector<double> want_read(static_cast<std::size_t>(rows.size()), 0.0);
      for (const std::int64_t i : {1, 4}) {  // the slots that exist
        const double* row = rows.as<double>() + i * width;
        std::copy_n(row, width, want.begin() + slots[static_cast<std::size_t>(i)] * width);
        std::copy_n(row, width, want_read.begin() + i * width);
      }
      EXPECT_EQ(device_cache.download(stream), want) << name_of(stored) << " width " << width;
      EXPECT_EQ(read.download(stream), want_read) << name_of(stored) << " width " << width;
    }
  }
}

}  // namespace
}  // namespace bifocal
