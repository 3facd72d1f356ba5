// Attention of single queries over caches, and copies in and out of them, on the device.
#include "ops/decode_attention.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::numbers_on_device;
using test::on_device;
using test::stored_normals;

// Caches around a tile of 64 slots, around 64 splits of one tile, and beyond.
const std::int64_t kSlots[] = {19, 0, 1, 63, 64, 65, 576, 4095, 4096, 4097, 9000};

// Rows with caches of these lengths, on the host in double and on the device.
struct Case {
  Tensor q, sink, want;
  std::vector<Tensor> k, v;
  std::vector<DeviceTensor> device_k, device_v;
  DeviceTensor device_q, device_sink, out;
  bool has_sink;

  Case(Memory& memory,
       const std::vector<std::int64_t>& slots,
       const Shape& shape,
       std::int64_t kv_heads,
       test::DeviceCase device,
       double sink_shift)
      : q(stored_normals(memory, device.stored, shape, 1, 2.0)),
        sink(memory.empty(Region::activations, DType::f64, {shape[1]})),
        want(memory.empty(Region::activations, DType::f64, shape)),
        device_q(on_device(q, device.stored, device.shift)),
        device_sink(device.stored, sink.shape(), device.shift),
        out(device.stored, shape, device.shift),
        has_sink(sink_shift >= 0.0) {
    const Tensor normals = stored_normals(memory, device.stored, sink.shape(), 2);
    for (std::int64_t h = 0; h < shape[1]; ++h) {
      sink.as<double>()[h] = test::rounded(device.stored, normals.as<double>()[h] + sink_shift);
    }
    device_sink.upload(sink);
    for (std::size_t row = 0; row < slots.size(); ++row) {
      const Shape cache{slots[row], kv_heads * shape[2]};
      k.push_back(stored_normals(memory, device.stored, cache, 10 + 2 * row));
      v.push_back(stored_normals(memory, device.stored, cache, 11 + 2 * row));
      device_k.push_back(on_device(k.back(), device.stored, device.shift));
      device_v.push_back(on_device(v.back(), device.stored, device.shift));
    }
    poison();
  }

  // What a run does not write stays NaN.
  void poison() const {
    constexpr int kNanByte = 0xff;  // all bits set are NaN in either type
    BIFOCAL_CUDA(cudaMemset(out.view().data, kNanByte, out.view().bytes()));
    BIFOCAL_CUDA(cudaDeviceSynchronize());
  }

  void run_host() const {
    const std::vector<ConstTensorView> keys(k.begin(), k.end());
    const std::vector<ConstTensorView> values(v.begin(), v.end());
    DecodeAttention op{want, q, keys, values, {}};
    if (has_sink) {
      op.sink = sink;
    }
    CpuStream cpu;
    run(cpu, op);
  }

  // Rows [first, first + count).
  void run_device(CudaStream& stream, std::int64_t first, std::int64_t count) const {
    std::vector<ConstTensorView> keys;
    std::vector<ConstTensorView> values;
    for (auto row = static_cast<std::size_t>(first); row < static_cast<std::size_t>(first + count);
         ++row) {
      keys.emplace_back(device_k[row].view());
      values.emplace_back(device_v[row].view());
    }
    DecodeAttention op{out.view().rows(first, first + count),
                       device_q.view().rows(first, first + count),
                       keys,
                       values,
                       {}};
    if (has_sink) {
      op.sink = device_sink.view();
    }
    op.check();
    run(stream, op);
  }
};

// Logits near 10 are rounded to 1e-6, a probability is so far off relative to itself, and a sum of
// thousands adds as much again; out sums values of up to 4.5 with probabilities that sum up to 1.
void expect_close(const Case& c, CudaStream& stream, DType stored) {
  const std::vector<double> magnitude(static_cast<std::size_t>(c.want.size()), 4.5);
  test::expect_close(c.out.download(stream), c.want, stored, 60.0, magnitude);
}

TEST(CudaDecodeAttention, MatchesTheCpuOp) {
  CudaStream stream;
  Memory memory;
  const std::vector<std::int64_t> slots(std::begin(kSlots), std::end(kSlots));
  const auto rows = static_cast<std::int64_t>(slots.size());
  for (const test::DeviceCase& device : test::device_cases()) {
    for (const double sink_shift : {-1.0, 0.0, 8.0}) {  // -1: none
      for (const std::int64_t dim : {64, 128}) {
        const Case c(memory, slots, {rows, 8, dim}, 2, device, sink_shift);
        c.run_host();
        c.run_device(stream, 0, rows);
        expect_close(c, stream, device.stored);
      }
    }
  }
}

TEST(CudaDecodeAttention, MatchesTheCpuOpForEveryGroupAndOddWidths) {
  CudaStream stream;
  Memory memory;
  for (const test::DeviceCase& device : test::device_cases()) {
    for (std::int64_t group = 1; group <= 8; ++group) {
      const Case c(memory, {7, 130}, {2, 2 * group, 256}, 2, device, 0.0);
      c.run_host();
      c.run_device(stream, 0, 2);
      expect_close(c, stream, device.stored);
    }
    for (const std::int64_t dim : {1, 6, 40, 512}) {
      const Case c(memory, {100, 64}, {2, 3, dim}, 1, device, 0.0);
      c.run_host();
      c.run_device(stream, 0, 2);
      expect_close(c, stream, device.stored);
    }
  }
}

TEST(CudaDecodeAttention, MoreRowsThanOneLaunchTakes) {
  CudaStream stream;
  Memory memory;
  std::vector<std::int64_t> slots(150);
  for (std::size_t row = 0; row < slots.size(); ++row) {
    slots[row] = static_cast<std::int64_t>(row * 7 % 130);
  }
  const Case c(memory, slots, {150, 4, 64}, 1, {DType::bf16, 0}, 1.0);
  c.run_host();
  c.run_device(stream, 0, 150);
  expect_close(c, stream, DType::bf16);
}

TEST(CudaDecodeAttention, ARowDoesNotKnowTheOthersAndRepeatsItsBits) {
  CudaStream stream;
  Memory memory;
  const std::vector<std::int64_t> slots(std::begin(kSlots), std::end(kSlots));
  const auto rows = static_cast<std::int64_t>(slots.size());
  const Case c(memory, slots, {rows, 8, 128}, 2, {DType::bf16, 0}, 1.0);
  c.run_device(stream, 0, rows);
  const std::vector<double> together = c.out.download(stream);
  c.poison();
  for (std::int64_t row = 0; row < rows; ++row) {
    c.run_device(stream, row, 1);
  }
  EXPECT_EQ(c.out.download(stream), together);
  for (int repeat = 0; repeat < 100; ++repeat) {
    c.poison();
    c.run_device(stream, 0, rows);
    ASSERT_EQ(c.out.download(stream), together) << "repeat " << repeat;
  }
}

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
