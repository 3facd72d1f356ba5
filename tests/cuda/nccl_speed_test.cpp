// Times of what a step of Qwen3-4B at 40,960 tokens sends between GPUs: BIFOCAL_SPEED=1.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "cuda/gpu_rank.h"

namespace bifocal::test {

namespace {

class NcclSpeed : public GpuRanksTest {};

TEST_F(NcclSpeed, WhatAStepSends) {
  if (std::getenv("BIFOCAL_SPEED") == nullptr) {
    GTEST_SKIP() << "set BIFOCAL_SPEED=1 to measure";
  }

  struct Case {
    const char* name;
    std::int64_t bytes;  // of whole, or of one message
  };

  constexpr Case kGathers[] = {{"all_gather, weights of a layer", 202 << 20},
                               {"all_gather, mLSTM states", 2 * 528448}};
  constexpr Case kReductions[] = {{"reduce_scatter, gradients of a layer", 404 << 20}};
  constexpr Case kExchanges[] = {{"exchange, halo of W 448", 1792 << 10},
                                 {"exchange, hidden states", 100 << 20}};
  const int ranks = world().size();
  const auto measure = [&](const char* name, double sent, const auto& start) {
    constexpr int kRuns = 20;
    for (int run = 0; run < 3; ++run) {
      start().wait();
    }
    gpu().stream().synchronize();
    test_world().barrier();
    const auto begin = std::chrono::steady_clock::now();
    for (int run = 0; run < kRuns; ++run) {
      start().wait();
    }
    const auto queued = std::chrono::steady_clock::now();
    gpu().stream().synchronize();
    const std::chrono::duration<double> host = queued - begin;
    const std::chrono::duration<double> all = std::chrono::steady_clock::now() - begin;
    if (world().rank() == 0) {
      std::printf("%-40s %10.3f MB sent a rank %9.3f ms %8.1f GB/s, CPU %6.1f us a call\n",
                  name,
                  sent / 1e6,
                  1e3 * all.count() / kRuns,
                  sent * kRuns / all.count() / 1e9,
                  1e6 * host.count() / kRuns);
    }
    EXPECT_GT(all.count(), 0.0);
  };
  for (const auto& [name, bytes] : kGathers) {
    const Tensor whole = gpu().empty(DType::u8, bytes / ranks * ranks);
    const TensorView part =
        whole.rows(world().rank() * (bytes / ranks), (world().rank() + 1) * (bytes / ranks));
    measure(name, static_cast<double>(bytes) / ranks * (ranks - 1), [&] {
      return world().start_all_gather(whole, part);
    });
  }
  for (const auto& [name, bytes] : kReductions) {
    const std::int64_t n = bytes / 4 / ranks;
    const Tensor whole = gpu().memory().zeros(Region::gradients, DType::f32, {n * ranks});
    const Tensor part = gpu().memory().zeros(Region::gradients, DType::f32, {n});
    measure(name, static_cast<double>(bytes) / ranks * (ranks - 1), [&] {
      return world().start_reduce_scatter(part, whole);
    });
  }
  const int next = (world().rank() + 1) % ranks;
  const int previous = (world().rank() + ranks - 1) % ranks;
  for (const auto& [name, bytes] : kExchanges) {
    const Tensor out = gpu().empty(DType::u8, bytes);
    const Tensor in = gpu().empty(DType::u8, bytes);
    measure(name, static_cast<double>(bytes), [&] {
      return world().start_exchange({{next, out}}, {{previous, in}});
    });
  }
}

}  // namespace

}  // namespace bifocal::test
