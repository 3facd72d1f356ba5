// Counter-based random numbers: a value depends on (seed, stream, index) alone, so it is the same
// however a tensor or a data set is cut over ranks and threads.
#pragma once

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

}  // namespace bifocal
