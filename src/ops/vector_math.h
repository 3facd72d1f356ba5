// What the CPU ops share: elementary functions and row loops that the compiler vectorises, and the
// dealing of rows to OpenMP threads.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include <omp.h>

namespace bifocal {

// ---- elementary functions, free of branches ----

// e^x. double: the standard library's. float: within 2 units in the last place; exactly 0 below
// -87.3365 (where subnormal numbers begin) and for -inf, +inf above 88.7228, NaN for NaN.
// Method: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial for e^r (relative error 3e-9, fitted on
// that interval), and n added to the exponent bits.
inline double fast_exp(double x) {
  return std::exp(x);
}

// (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2; times r^2 it is wrong by at most 3e-9 e^r.
inline float exp_excess_ratio(float r) {
  float p = 0.00138143194F;
  p = p * r + 0.00836885162F;
  p = p * r + 0.0416684002F;
  p = p * r + 0.166665196F;
  return p * r + 0.49999994F;
}

inline float fast_exp(float x) {
  constexpr float kLog2E = 1.44269504F;
  constexpr float kLn2High = 0.693145752F;  // 15 bits: n * kLn2High is exact
  constexpr float kLn2Low = 1.42860677e-6F;
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: a sum with it has integer low bits
  const float shifted = x * kLog2E + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  const float p = (exp_excess_ratio(r) * r) * r + r + 1.0F;
  const std::uint32_t bits =
      std::bit_cast<std::uint32_t>(p) + (std::bit_cast<std::uint32_t>(shifted) << 23);
  // Masks instead of conditional expressions: gcc turns those into branches and scalar loops.
  const std::uint32_t above_zero = 0U - static_cast<std::uint32_t>(x >= -87.3365F);
  const std::uint32_t infinite = 0U - static_cast<std::uint32_t>(x > 88.7228F);
  const std::uint32_t not_a_number = 0U - static_cast<std::uint32_t>(x != x);
  constexpr std::uint32_t kInfinity = 0x7f800000U;
  constexpr std::uint32_t kNan = 0x7fc00000U;
  return std::bit_cast<float>((bits & above_zero & ~infinite) | (infinite & kInfinity) |
                              (not_a_number & kNan));
}

// 1 / (1 + e^-x).
template <class T>
T sigmoid(T x) {
  return T{1} / (T{1} + fast_exp(-x));
}

// log(sigmoid(x)), exact in both tails.
template <class T>
T log_sigmoid(T x) {
  return std::min(x, T{0}) - std::log1p(std::exp(-std::abs(x)));
}

// ---- rows ----

// Largest element; -inf for an empty row.
template <class T>
T row_max(const T* x, std::int64_t size) {
  T largest = -std::numeric_limits<T>::infinity();
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < size; ++i) {
    largest = x[i] > largest ? x[i] : largest;
  }
  return largest;
}

template <class T>
T row_sum(const T* x, std::int64_t size) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < size; ++i) {
    sum += x[i];
  }
  return sum;
}

template <class T>
T dot(const T* a, const T* b, std::int64_t size) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < size; ++i) {
    sum += a[i] * b[i];
  }
  return sum;
}

// y += factor * x.
template <class T>
void axpy(T* y, T factor, const T* x, std::int64_t size) {
#pragma omp simd
  for (std::int64_t i = 0; i < size; ++i) {
    y[i] += factor * x[i];
  }
}

// y = e^(x - shift); returns the sum. y may be x. Elements at -inf give 0; shift must be finite.
template <class T>
T exp_row(T* y, const T* x, T shift, std::int64_t size) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < size; ++i) {
    const T e = fast_exp(x[i] - shift);
    y[i] = e;
    sum += e;
  }
  return sum;
}

template <class T>
void scale_row(T* x, T factor, std::int64_t size) {
#pragma omp simd
  for (std::int64_t i = 0; i < size; ++i) {
    x[i] *= factor;
  }
}

// y = softmax(x); y may be x. Returns log(sum e^x). At least one element must be finite.
template <class T>
T softmax_row(T* y, const T* x, std::int64_t size) {
  const T largest = row_max(x, size);
  const T sum = exp_row(y, x, largest, size);
  scale_row(y, T{1} / sum, size);
  return largest + std::log(sum);
}

// ---- threads ----

// Part `part` of [0, count) cut into `parts` neighbouring ranges whose lengths are multiples of
// `grain` except the last's.
struct Range {
  std::int64_t begin, end;
};

inline Range range_of_part(std::int64_t count,
                           std::int64_t grain,
                           std::int64_t part,
                           std::int64_t parts) {
  const std::int64_t blocks = (count + grain - 1) / grain;
  return {std::min(count, blocks * part / parts * grain),
          std::min(count, blocks * (part + 1) / parts * grain)};
}

// Calls function(begin, end) for ranges that cover [0, count) once, one range per OpenMP thread, on
// the calling thread alone where count * work is small (work: about the nanoseconds one index
// takes) or where this is called from inside a parallel region. function must not throw.
template <class Function>
void parallel_ranges(std::int64_t count,
                     std::int64_t grain,
                     std::int64_t work,
                     const Function& function) {
  constexpr std::int64_t kWorthThreads = 20000;  // nanoseconds; waking a team takes about 5000
  if (count <= 0) {
    return;
  }
  if (count <= grain || count * work < kWorthThreads || omp_in_parallel() != 0 ||
      omp_get_max_threads() == 1) {
    function(std::int64_t{0}, count);
    return;
  }
#pragma omp parallel
  {
    const Range range = range_of_part(count, grain, omp_get_thread_num(), omp_get_num_threads());
    if (range.begin < range.end) {
      function(range.begin, range.end);
    }
  }
}

}  // namespace bifocal
