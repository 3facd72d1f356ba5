// The permutation without a table.
#include "core/random.h"

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

namespace bifocal {
namespace {

std::vector<std::uint64_t> all_of(const RandomPermutation& permutation) {
  std::vector<std::uint64_t> numbers;
  for (std::uint64_t i = 0; i < permutation.size(); ++i) {
    numbers.push_back(permutation(i));
  }
  return numbers;
}

TEST(RandomPermutation, HoldsEveryNumberOnce) {
  for (std::uint64_t size = 1; size <= 300; ++size) {
    std::vector<std::uint64_t> numbers = all_of(RandomPermutation(size, 7, size));
    std::ranges::sort(numbers);
    for (std::uint64_t i = 0; i < size; ++i) {
      ASSERT_EQ(numbers[i], i) << size;
    }
  }
}

TEST(RandomPermutation, StaysInsideHugeRangesWithoutACollision) {
  const std::uint64_t size = (std::uint64_t{1} << 61) + 3;
  const RandomPermutation permutation(size, 1, 2);
  std::vector<std::uint64_t> numbers;
  for (std::uint64_t i = 0; i < 2000; ++i) {
    numbers.push_back(permutation(i));
    ASSERT_LT(numbers.back(), size);
    numbers.push_back(permutation(size - 1 - i));
  }
  std::ranges::sort(numbers);
  EXPECT_EQ(std::ranges::adjacent_find(numbers), numbers.end());
}

TEST(RandomPermutation, DependsOnSeedAndStreamAlone) {
  const auto first = all_of(RandomPermutation(1000, 1, 2));
  EXPECT_EQ(first, all_of(RandomPermutation(1000, 1, 2)));
  EXPECT_NE(first, all_of(RandomPermutation(1000, 2, 2)));
  EXPECT_NE(first, all_of(RandomPermutation(1000, 1, 3)));
}

// Over many streams every place gets every number equally often.
TEST(RandomPermutation, IsUniformOverStreams) {
  constexpr std::size_t kSize = 12;
  constexpr int kStreams = 12000;
  std::vector<int> count(kSize * kSize);
  for (int stream = 0; stream < kStreams; ++stream) {
    const RandomPermutation permutation(kSize, 5, static_cast<std::uint64_t>(stream));
    for (std::size_t place = 0; place < kSize; ++place) {
      ++count[place * kSize + permutation(place)];
    }
  }
  double chi_squared = 0.0;
  constexpr double kExpected = kStreams / static_cast<double>(kSize);
  for (const int seen : count) {
    chi_squared += (seen - kExpected) * (seen - kExpected) / kExpected;
  }
  // 121 degrees of freedom: mean 121, deviation 15.6; 5 deviations above.
  EXPECT_LT(chi_squared, 199.0);
}

// Neighbours in place are not neighbours in number: the mean step is that of independent draws.
TEST(RandomPermutation, ScattersNeighbours) {
  constexpr std::uint64_t kSize = 100000;
  const RandomPermutation permutation(kSize, 3, 4);
  double sum = 0.0;
  for (std::uint64_t i = 0; i + 1 < kSize; ++i) {
    const auto a = static_cast<double>(permutation(i));
    const auto b = static_cast<double>(permutation(i + 1));
    sum += std::abs(a - b);
  }
  // A third of the size; the mean of 1e5 steps deviates by 0.25 % of it.
  EXPECT_NEAR(sum / kSize, kSize / 3.0, 0.0125 * kSize / 3.0);
}

}  // namespace
}  // namespace bifocal
