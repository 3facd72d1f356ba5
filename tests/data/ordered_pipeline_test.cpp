// A reader, workers and a writer: order, bounds, errors.
#include "data/ordered_pipeline.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "core/random.h"

namespace bifocal {
namespace {

struct Number {
  int value = 0;
  std::size_t size = 1;

  std::size_t weight() const { return size; }
};

using Pipeline = OrderedPipeline<Number, int>;

void pause(int value) {
  std::this_thread::sleep_for(
      std::chrono::microseconds(random_below(300, 1, 0, static_cast<std::uint64_t>(value))));
}

// What a run consumed, and its error.
struct Outcome {
  std::vector<int> consumed;
  std::string error;
};

Outcome run(const PipelineLimits& limits, int count, int bad_item, int bad_result, int bad_end) {
  Outcome outcome;
  int next = 0;
  try {
    Pipeline::run(
        limits,
        [&]() -> std::optional<Number> {
          if (next == bad_item) {
            throw std::runtime_error("produce");
          }
          return next < count ? std::optional(Number{next++}) : std::nullopt;
        },
        [&](const Number& number) {
          pause(number.value);
          if (number.value >= bad_result) {
            throw std::runtime_error("transform " + std::to_string(number.value));
          }
          return 2 * number.value;
        },
        [&](int&& result) {
          if (result == 2 * bad_end) {
            throw std::runtime_error("consume");
          }
          outcome.consumed.push_back(result);
        },
        [] {});
  } catch (const std::runtime_error& error) {
    outcome.error = error.what();
  }
  return outcome;
}

constexpr int kNever = 1 << 20;

TEST(OrderedPipeline, ResultsComeInTheOrderOfTheItems) {
  for (const std::size_t workers : {1U, 2U, 7U}) {
    const Outcome outcome = run({.workers = workers, .items = 5}, 500, -1, kNever, kNever);
    EXPECT_EQ(outcome.error, "");
    ASSERT_EQ(outcome.consumed.size(), 500U);
    for (int i = 0; i < 500; ++i) {
      ASSERT_EQ(outcome.consumed[static_cast<std::size_t>(i)], 2 * i);
    }
  }
  EXPECT_TRUE(run({.workers = 3}, 0, -1, kNever, kNever).consumed.empty());
}

TEST(OrderedPipeline, TheFirstErrorInTheOrderOfTheItemsIsThrown) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    for (const std::size_t workers : {1U, 4U}) {
      const PipelineLimits limits{.workers = workers, .items = 20};
      Outcome outcome = run(limits, 200, -1, 33, kNever);  // every item from 33 on fails
      EXPECT_EQ(outcome.error, "transform 33");
      EXPECT_EQ(outcome.consumed.size(), 33U);
      outcome = run(limits, 200, 33, kNever, kNever);
      EXPECT_EQ(outcome.error, "produce");
      EXPECT_EQ(outcome.consumed.size(), 33U);
      EXPECT_EQ(run(limits, 200, 33, 32, kNever).error, "transform 32");
      EXPECT_EQ(run(limits, 200, 0, kNever, kNever).error, "produce");
      outcome = run(limits, 200, 20, 15, 10);
      EXPECT_EQ(outcome.error, "consume");
      EXPECT_EQ(outcome.consumed.size(), 10U);
    }
  }
}

TEST(OrderedPipeline, HoldsNoMoreThanTheLimitsSay) {
  for (const PipelineLimits limits : {PipelineLimits{.workers = 3, .items = 4},
                                      PipelineLimits{.workers = 3, .items = 100, .weight = 40}}) {
    std::atomic<int> produced = 0;
    int consumed = 0;
    int most = 0;
    Pipeline::run(
        limits,
        [&]() -> std::optional<Number> {
          return produced < 200 ? std::optional(Number{produced++, 10}) : std::nullopt;
        },
        [](const Number& number) { return number.value; },
        [&](int&& result) {
          pause(result);
          most = std::max(most, produced - consumed);
          ++consumed;
        },
        [] {});
    EXPECT_EQ(consumed, 200);
    EXPECT_LE(most, 6);  // four that wait, the one consumed, and the one produced for its place
  }
}

TEST(OrderedPipeline, IdleRunsWhileNothingArrivesAndMayEndTheRun) {
  std::atomic<bool> is_free = false;
  int calls = 0;
  EXPECT_THROW(Pipeline::run(
                   {.workers = 1},
                   [] { return std::optional(Number{}); },
                   [&](const Number&) {
                     while (!is_free) {
                       std::this_thread::sleep_for(std::chrono::milliseconds(1));
                     }
                     return 0;
                   },
                   [](int&&) {},
                   [&] {
                     if (++calls == 3) {
                       is_free = true;
                       throw std::runtime_error("stop");
                     }
                   }),
               std::runtime_error);
  EXPECT_EQ(calls, 3);
}

}  // namespace
}  // namespace bifocal
