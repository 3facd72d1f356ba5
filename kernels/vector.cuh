// Groups of elements that move in one access of up to 16 bytes, and their conversion to float32.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "core/dtype.h"

namespace bifocal {

template <class T, int N>
struct alignas(sizeof(T) * N) Vector {
  T element[N];
};

// Elements of T in a 16-byte access.
template <class T>
inline constexpr int kVectorSize = 16 / static_cast<int>(sizeof(T));

__device__ inline float load_float(float x) {
  return x;
}

__device__ inline float load_float(BFloat16 x) {
  return __uint_as_float(static_cast<std::uint32_t>(x.bits) << 16);
}

template <class T>
__device__ T store_as(float x);

template <>
__device__ inline float store_as<float>(float x) {
  return x;
}

template <>
__device__ inline BFloat16 store_as<BFloat16>(float x) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}

// Two bfloat16, `low` in the lower half.
__device__ inline std::uint32_t pack_bfloat16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return static_cast<std::uint32_t>(__bfloat16_as_ushort(pair.x)) |
         static_cast<std::uint32_t>(__bfloat16_as_ushort(pair.y)) << 16;
}

template <int N, class T>
__device__ Vector<T, N> load_vector(const T* base, std::int64_t index) {
  return reinterpret_cast<const Vector<T, N>*>(base)[index];
}

template <int N, class T>
__device__ void store_vector(T* base, std::int64_t index, const Vector<T, N>& value) {
  reinterpret_cast<Vector<T, N>*>(base)[index] = value;
}

// 16 bytes of elements, kept as they lie in memory: as elements of 16 bits of their own they would
// take a register each.
template <class T>
struct alignas(16) Packed {
  static constexpr int kSize = kVectorSize<T>;
  std::uint32_t word[4];

  __device__ float operator[](int i) const {
    if constexpr (kSize == 4) {
      return __uint_as_float(word[i]);
    } else {
      return __uint_as_float(i % 2 == 0 ? word[i / 2] << 16 : word[i / 2] & 0xffff0000U);
    }
  }

  // Rounds to T.
  __device__ static Packed of(const float (&x)[kSize]) {
    Packed result;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kSize == 4) {
        result.word[w] = __float_as_uint(x[w]);
      } else {
        result.word[w] = pack_bfloat16(x[2 * w], x[2 * w + 1]);
      }
    }
    return result;
  }
};

template <class T>
__device__ Packed<T> load_packed(const T* base, std::int64_t group) {
  return reinterpret_cast<const Packed<T>*>(base)[group];
}

template <class T>
__device__ void store_packed(T* base, std::int64_t group, const Packed<T>& value) {
  reinterpret_cast<Packed<T>*>(base)[group] = value;
}

template <int N>
struct Floats {
  float element[N];
};

// Group `group` of N elements as float32, in accesses of up to 16 bytes.
template <int N, class T>
__device__ Floats<N> load_floats(const T* base, std::int64_t group) {
  Floats<N> result;
  if constexpr (N % kVectorSize<T> == 0) {
    constexpr int kSize = kVectorSize<T>;
    Packed<T> packed[N / kSize];
#pragma unroll
    for (int p = 0; p < N / kSize; ++p) {
      packed[p] = load_packed(base, group * (N / kSize) + p);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      result.element[i] = packed[i / kSize][i % kSize];
    }
  } else {
    const auto v = load_vector<N>(base, group);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      result.element[i] = load_float(v.element[i]);
    }
  }
  return result;
}

// The same outwards, rounded to T.
template <int N, class T>
__device__ void store_floats(T* base, std::int64_t group, const Floats<N>& values) {
  if constexpr (N % kVectorSize<T> == 0) {
    constexpr int kSize = kVectorSize<T>;
#pragma unroll
    for (int p = 0; p < N / kSize; ++p) {
      float part[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        part[i] = values.element[p * kSize + i];
      }
      store_packed(base, group * (N / kSize) + p, Packed<T>::of(part));
    }
  } else {
    Vector<T, N> v;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v.element[i] = store_as<T>(values.element[i]);
    }
    store_vector<N>(base, group, v);
  }
}

// Whether pointers lie on multiples of bytes.
template <class... Pointers>
bool is_aligned(std::size_t bytes, const Pointers*... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % bytes == 0) && ...);
}

}  // namespace bifocal
