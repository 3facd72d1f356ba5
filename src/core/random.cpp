// Counter-based random numbers.
#include "core/random.h"

#include <bit>
#include <cmath>
#include <numbers>

#include "core/error.h"

namespace bifocal {

namespace {

std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace

std::uint64_t random_bits(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return mix(mix(mix(seed) ^ stream) ^ index);
}

std::uint64_t stream_of(std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : name) {
    hash ^= static_cast<unsigned char>(c);
    hash *= 0x100000001b3ULL;
  }
  return hash;
}

double random_uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return static_cast<double>(random_bits(seed, stream, index) >> 11) * 0x1.0p-53;
}

double random_normal(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  const double u = 1.0 - random_uniform(seed, stream, 2 * index);
  const double v = random_uniform(seed, stream, 2 * index + 1);
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
}

std::uint64_t random_below(std::uint64_t bound,
                           std::uint64_t seed,
                           std::uint64_t stream,
                           std::uint64_t index) {
  return static_cast<std::uint64_t>(random_uniform(seed, stream, index) *
                                    static_cast<double>(bound));
}

RandomPermutation::RandomPermutation(std::uint64_t size, std::uint64_t seed, std::uint64_t stream)
    : size_(size) {
  BIFOCAL_ASSERT(size >= 1 && size <= std::uint64_t{1} << 62);
  const auto bits = static_cast<int>(std::bit_width(size - 1));
  low_bits_ = (bits + 1) / 2;
  low_mask_ = (std::uint64_t{1} << low_bits_) - 1;
  high_mask_ = (std::uint64_t{1} << (bits - low_bits_)) - 1;
  for (std::size_t round = 0; round < kRounds; ++round) {
    keys_[round] = random_bits(seed, stream, round);
  }
}

std::uint64_t RandomPermutation::operator()(std::uint64_t index) const {
  // The network permutes fewer than 2 * size numbers. Following a cycle from inside the range until
  // it is inside again is a permutation of the range, and takes less than two passes on average.
  std::uint64_t low = index & low_mask_;
  std::uint64_t high = index >> low_bits_;
  do {
    for (std::size_t round = 0; round < kRounds; round += 2) {
      low ^= mix(high ^ keys_[round]) & low_mask_;
      high ^= mix(low ^ keys_[round + 1]) & high_mask_;
    }
  } while ((high << low_bits_ | low) >= size_);
  return high << low_bits_ | low;
}

}  // namespace bifocal
