// Bytes arrive as they left, whatever the size and however the host's side goes on.
#include "ops/transfer.h"

#include <algorithm>
#include <numeric>
#include <span>

#include <gtest/gtest.h>

#include "kernels/cuda_stream.h"
#include "kernels/pinned_ring.h"
#include "parallel/backend.h"

namespace bifocal {
namespace {

std::vector<std::uint8_t> pattern(std::size_t bytes, std::uint8_t first) {
  std::vector<std::uint8_t> values(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    values[i] = static_cast<std::uint8_t>(first + i * 7 + i / 251);
  }
  return values;
}

template <class Values>
ConstTensorView view_of(const Values& values) {
  return {values.data(), DType::u8, {static_cast<std::int64_t>(values.size())}};
}

std::vector<std::uint8_t> downloaded(CudaStream& stream, const ConstTensorView& tensor) {
  std::vector<std::uint8_t> host(tensor.bytes());
  run(stream, Download{.y = {host.data(), tensor.dtype, tensor.shape}, .x = tensor});
  return host;
}

Tensor on_device(CudaStream& stream, std::size_t bytes) {
  return stream.memory().empty(Region::activations, DType::u8, {static_cast<std::int64_t>(bytes)});
}

TEST(CudaTransfer, RoundTripsOfEverySizeAroundAPieceAreExact) {
  CudaStream stream;
  const std::size_t piece = stream.ring().largest_piece();
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, std::size_t{255}, piece - 1, piece, piece + 1, 5 * piece}) {
    const std::vector<std::uint8_t> sent = pattern(bytes, 3);
    const Tensor tensor = on_device(stream, bytes);
    run(stream, Upload{.y = tensor, .x = view_of(sent)});
    EXPECT_EQ(downloaded(stream, tensor), sent) << bytes << " bytes";
  }
}

TEST(CudaTransfer, PinnedMemoryOnTheHostGetsTheSameBytes) {
  const std::unique_ptr<Backend> backend = make_cuda_backend(0, 0);
  CudaStream& stream = *std::get<CudaStream*>(backend->stream().device);
  const std::size_t piece = stream.ring().largest_piece();
  for (const std::size_t bytes : {std::size_t{1}, piece, piece + 1, 5 * piece + 3}) {
    const std::vector<std::uint8_t> sent = pattern(bytes, 3);
    const Tensor tensor = on_device(stream, bytes);
    const Tensor later = on_device(stream, bytes);
    const Tensor host = backend->host_memory().zeros(
        Region::optimizer, DType::u8, {static_cast<std::int64_t>(bytes)});
    run(stream, Upload{.y = tensor, .x = view_of(sent)});
    run(stream, Copy{.y = later, .x = tensor});
    run(stream, Download{.y = host, .x = later});
    EXPECT_TRUE(
        std::ranges::equal(std::span<const std::uint8_t>(host.as<std::uint8_t>(), bytes), sent))
        << bytes << " bytes";
  }
}

TEST(CudaTransfer, TheSourceMayChangeOnceUploadReturns) {
  CudaStream stream;
  constexpr std::size_t kUploads = 400;  // several times around the ring
  constexpr std::size_t kBytes = 1'000'003;
  std::vector<Tensor> tensors;
  std::vector<std::uint8_t> source(kBytes);
  for (std::size_t i = 0; i < kUploads; ++i) {
    std::fill(source.begin(), source.end(), static_cast<std::uint8_t>(i));
    tensors.push_back(on_device(stream, kBytes));
    run(stream, Upload{.y = tensors.back(), .x = view_of(source)});
    std::fill(source.begin(), source.end(), 0xff);
  }
  for (std::size_t i = 0; i < kUploads; ++i) {
    const std::vector<std::uint8_t> got = downloaded(stream, tensors[i]);
    ASSERT_EQ(std::count(got.begin(), got.end(), static_cast<std::uint8_t>(i)),
              static_cast<std::int64_t>(kBytes))
        << "upload " << i;
  }
}

TEST(CudaTransfer, CopiesFollowTheWorkQueuedBefore) {
  CudaStream stream;
  const std::vector<std::uint8_t> first = pattern(3'000'001, 1);
  const Tensor x = on_device(stream, first.size());
  const Tensor y = on_device(stream, first.size());
  run(stream, Upload{.y = x, .x = view_of(first)});
  run(stream, Copy{.y = y, .x = x});
  run(stream, Upload{.y = x, .x = view_of(pattern(first.size(), 2))});
  EXPECT_EQ(downloaded(stream, y), first);
}

TEST(CudaTransfer, HeadsAreCopiedAsOnTheCpu) {
  CudaStream stream;
  CpuStream cpu;
  Memory host;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    const Shape all{37, 6, 5};
    const Shape part{37, 2, 5};
    const Tensor x = host.empty(Region::activations, dtype, all);
    const std::vector<std::uint8_t> values = pattern(x.view().bytes(), 9);
    std::copy(values.begin(), values.end(), static_cast<std::uint8_t*>(x.view().data));
    const Tensor device_x = stream.memory().empty(Region::activations, dtype, all);
    const Tensor device_y = stream.memory().zeros(Region::activations, dtype, part);
    const Tensor device_back = stream.memory().zeros(Region::activations, dtype, all);
    const Tensor y = host.zeros(Region::activations, dtype, part);
    const Tensor back = host.zeros(Region::activations, dtype, all);
    run(stream, Upload{.y = device_x, .x = x});
    for (std::int64_t first : {0, 3, 4}) {
      run(cpu, CopyHeads{.y = y, .x = x, .x_first = first, .count = 2});
      run(cpu, CopyHeads{.y = back, .x = y, .y_first = first, .count = 2});
      run(stream, CopyHeads{.y = device_y, .x = device_x, .x_first = first, .count = 2});
      run(stream, CopyHeads{.y = device_back, .x = device_y, .y_first = first, .count = 2});
    }
    for (const auto& [got, want] : {std::pair{&device_y, &y}, std::pair{&device_back, &back}}) {
      const auto* bytes = static_cast<const std::uint8_t*>(want->view().data);
      EXPECT_EQ(downloaded(stream, *got),
                std::vector<std::uint8_t>(bytes, bytes + want->view().bytes()));
    }
  }
}

}  // namespace
}  // namespace bifocal
