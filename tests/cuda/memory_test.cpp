// Device memory: mapped as it is needed, held as the card sees it, used again in the stream's
// order.
#include "core/memory.h"

#include <gtest/gtest.h>

#include "core/random.h"
#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"
#include "kernels/device_scratch.h"
#include "ops/elementwise.h"
#include "ops/transfer.h"
#include "support/error_of.h"

namespace bifocal {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

std::size_t free_on_card() {
  std::size_t available = 0;
  std::size_t total = 0;
  BIFOCAL_CUDA(cudaMemGetInfo(&available, &total));
  return available;
}

Tensor bytes_of(CudaStream& stream, std::int64_t bytes, Region region = Region::activations) {
  return stream.memory().empty(region, DType::u8, {bytes});
}

TEST(CudaMemory, WhatIsHeldIsWhatTheCardLosesAndTrimReturnsIt) {
  CudaStream stream;
  const std::size_t before = free_on_card();
  {
    const Tensor small = bytes_of(stream, 1000);
    const Tensor large = bytes_of(stream, 100 * kMiB);
    EXPECT_EQ(stream.memory().held_bytes(), static_cast<std::size_t>((2 + 128) * kMiB));
    EXPECT_EQ(before - free_on_card(), stream.memory().held_bytes());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(large.view().data) % 512, 0U);
  }
  EXPECT_EQ(before - free_on_card(), stream.memory().held_bytes());
  stream.memory().trim();
  EXPECT_EQ(stream.memory().held_bytes(), 0U);
  EXPECT_EQ(free_on_card(), before);
  EXPECT_EQ(stream.memory().peak_held_bytes(), static_cast<std::size_t>(130 * kMiB));
}

TEST(CudaMemory, TheLimitIsACardOfThatSizeAndItsErrorHasTheAccount) {
  CudaStream stream({.limit_bytes = static_cast<std::size_t>(256 * kMiB)});
  const Tensor weights = bytes_of(stream, 150 * kMiB, Region::weights);
  EXPECT_LE(stream.memory().held_bytes(), static_cast<std::size_t>(256 * kMiB));
  const std::string text =
      test::error_of([&] { (void)bytes_of(stream, 110 * kMiB, Region::loss); });
  for (const char* part : {"wanted 110.00 MiB more for loss",
                           "memory.limit_gib allows 256.00 MiB",
                           "weights          now   150.00 MiB"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in:\n" << text;
  }
  EXPECT_NO_THROW((void)bytes_of(stream, 96 * kMiB, Region::loss));
}

TEST(CudaMemory, FreeMemoryInPiecesMakesOneBlock) {
  CudaStream stream({.limit_bytes = static_cast<std::size_t>(256 * kMiB)});
  std::vector<Tensor> blocks;
  for (int i = 0; i < 8; ++i) {
    blocks.push_back(bytes_of(stream, 32 * kMiB));
  }
  for (const std::size_t freed : {0U, 2U, 4U, 6U}) {
    blocks[freed] = Tensor();
  }
  const Tensor whole = stream.memory().zeros(Region::activations, DType::u8, {128 * kMiB});
  std::vector<std::uint8_t> host(static_cast<std::size_t>(128 * kMiB), 1);
  run(stream, Download{.y = {host.data(), DType::u8, {128 * kMiB}}, .x = whole});
  EXPECT_EQ(std::count(host.begin(), host.end(), 0), 128 * kMiB);
}

// Ops queued before a block came back still read what they should.
TEST(CudaMemory, ABlockGivenBackServesTheWorkThatWasQueuedFirst) {
  CudaStream stream;
  constexpr std::int64_t kSize = 8 * kMiB;
  std::vector<float> ones(static_cast<std::size_t>(kSize), 1.0F);
  const ConstTensorView host{ones.data(), DType::f32, {kSize}};
  const Tensor sum = stream.memory().zeros(Region::activations, DType::f32, {kSize});
  for (int round = 0; round < 50; ++round) {
    const Tensor x = stream.memory().empty(Region::activations, DType::f32, {kSize});
    if (round % 2 == 0) {
      run(stream, Upload{.y = x, .x = host});
    } else {
      run(stream, Zero{.x = x});
    }
    run(stream, Add{.y = sum, .a = sum, .b = x});
  }
  std::vector<float> got(ones.size());
  run(stream, Download{.y = {got.data(), DType::f32, {kSize}}, .x = sum});
  EXPECT_EQ(std::count(got.begin(), got.end(), 25.0F), kSize);
}

TEST(CudaMemory, ScratchIsAccountedWhileAnOpIsCalled) {
  CudaStream stream;
  {
    DeviceScratch scratch(stream);
    float* first = scratch.take<float>(100);
    const float* second = scratch.take<float>(0);
    EXPECT_NE(first, second);
    EXPECT_EQ(stream.memory().current_bytes(Region::scratch), 1024U);
  }
  EXPECT_EQ(stream.memory().current_bytes(Region::scratch), 0U);
  EXPECT_EQ(stream.memory().peak_bytes(Region::scratch), 1024U);
}

// Blocks of random sizes filled with their number: none is written over.
TEST(CudaMemory, RandomBlocksKeepTheirContentsUnderALimit) {
  CudaStream stream({.limit_bytes = static_cast<std::size_t>(512 * kMiB)});

  struct Block {
    Tensor tensor;
    std::uint8_t value;
  };

  std::vector<Block> blocks;
  std::vector<std::uint8_t> host;
  const auto check = [&](const Block& block) {
    host.assign(static_cast<std::size_t>(block.tensor.size()), 0);
    run(stream, Download{.y = {host.data(), DType::u8, block.tensor.shape()}, .x = block.tensor});
    return std::count(host.begin(), host.end(), block.value) == block.tensor.size();
  };
  std::size_t refused = 0;
  for (std::uint64_t step = 0; step < 300; ++step) {
    if (!blocks.empty() && random_below(5, 1, 0, step) < 2) {
      const auto which = static_cast<std::ptrdiff_t>(random_below(blocks.size(), 2, 0, step));
      ASSERT_TRUE(check(blocks[static_cast<std::size_t>(which)])) << "step " << step;
      blocks.erase(blocks.begin() + which);
      continue;
    }
    const auto size = static_cast<std::int64_t>(1 + random_below(100 * kMiB, 3, 0, step)) >>
                      (random_below(2, 4, 0, step) * 8);
    try {
      Block block{bytes_of(stream, size), static_cast<std::uint8_t>(1 + step % 200)};
      host.assign(static_cast<std::size_t>(size), block.value);
      run(stream, Upload{.y = block.tensor, .x = {host.data(), DType::u8, {size}}});
      blocks.push_back(std::move(block));
    } catch (const Error&) {
      ++refused;
    }
  }
  for (const Block& block : blocks) {
    EXPECT_TRUE(check(block));
  }
  EXPECT_GT(refused, 0U);
}

TEST(CudaMemory, ADeviceThatIsNotThereIsRefused) {
  EXPECT_THROW(CudaStream(1000), Error);
}

}  // namespace
}  // namespace bifocal
