// Counter-based random numbers: a value depends on (seed, stream, index) alone, so it is the same
// however a tensor or a data set is cut over ranks and threads.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace bifocal {

// 64 well-mixed bits. Finaliser: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), applied thrice.
std::uint64_t random_bits(std::uint64_t seed, std::uint64_t stream, std::uint64_t index);

// A stream number for a name (FNV-1a), for example of a parameter.
std::uint64_t stream_of(std::string_view name);

// Uniform in [0, 1).
double random_uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t index);

// Standard normal (Box and Muller).
double random_normal(std::uint64_t seed, std::uint64_t stream, std::uint64_t index);

// Uniform in [0, bound), without bias worth naming for bound < 2^32.
std::uint64_t random_below(std::uint64_t bound,
                           std::uint64_t seed,
                           std::uint64_t stream,
                           std::uint64_t index);

// A pseudo-random permutation of 0..size-1 that needs no table: a Feistel network over the bits of
// size - 1, walked on while it leaves the range. The order depends on (size, seed, stream) alone.
class RandomPermutation {
 public:
  // 1 <= size <= 2^62.
  RandomPermutation(std::uint64_t size, std::uint64_t seed, std::uint64_t stream);

  std::uint64_t size() const { return size_; }

  // The number at place `index` < size.
  std::uint64_t operator()(std::uint64_t index) const;

 private:
  static constexpr std::size_t kRounds = 6;

  std::uint64_t size_;
  int low_bits_;  // halves of the network: low_bits_, and what is left above them
  std::uint64_t low_mask_;
  std::uint64_t high_mask_;
  std::array<std::uint64_t, kRounds> keys_;
};

}  // namespace bifocal
