// The counter-based random numbers of core/random.h on the device: the same bits.
#pragma once

#include <cstdint>

namespace bifocal {

__device__ inline std::uint64_t device_mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// The numbers of one (seed, stream).
class DeviceRandom {
 public:
  __device__ DeviceRandom(std::uint64_t seed, std::uint64_t stream)
      : key_(device_mix(device_mix(seed) ^ stream)) {}

  // Uniform in [0, 1) with 53 bits.
  __device__ double uniform(std::uint64_t index) const {
    return static_cast<double>(device_mix(key_ ^ index) >> 11) * 0x1.0p-53;
  }

  // Standard normal (Box and Muller).
  __device__ double normal(std::uint64_t index) const {
    const double u = 1.0 - uniform(2 * index);
    const double v = uniform(2 * index + 1);
    return sqrt(-2.0 * log(u)) * cospi(2.0 * v);
  }

 private:
  std::uint64_t key_;
};

}  // namespace bifocal
