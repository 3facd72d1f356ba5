// Small element by element ops.
#include "ops/elementwise.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "ops/vector_math.h"
#include "ops/widened.h"

namespace bifocal {

namespace {

constexpr const char* kWhere = "elementwise";
constexpr std::int64_t kGrain = 64;

// An element takes less than parallel_ranges' nanosecond: ranges are counted in groups of kGrain.
template <class Function>
void parallel_elements(std::int64_t size, const Function& function) {
  constexpr std::int64_t kGroupNanoseconds = 16;
  parallel_ranges((size + kGrain - 1) / kGrain,
                  1,
                  kGroupNanoseconds,
                  [&](std::int64_t begin, std::int64_t end) {
                    function(begin * kGrain, std::min(size, end * kGrain));
                  });
}

// Calls function(T{}) for any of the four floating-point types.
template <class Function>
void dispatch_floating(DType type, const Function& function) {
  if (type == DType::bf16) {
    function(BFloat16{});
  } else if (type == DType::f16) {
    function(Float16{});
  } else {
    dispatch_real(kWhere, type, function);
  }
}

// The float32 next to x towards zero, last bit set unless x itself is a float32. Rounding that to
// 16 bits equals rounding x, which rounding twice to nearest does not.
float round_to_odd(double x) {
  const auto nearest = static_cast<float>(x);
  const auto back = static_cast<double>(nearest);
  if (back == x || std::isnan(x)) {
    return nearest;
  }
  auto bits = std::bit_cast<std::uint32_t>(nearest);
  if (std::abs(back) > std::abs(x)) {
    bits -= 1;
  }
  return std::bit_cast<float>(bits | 1U);
}

template <class To, class From>
To convert(From x) {
  constexpr bool kWide = std::is_same_v<From, float> || std::is_same_v<From, double>;
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (!kWide) {
    return convert<To>(to_float(x));
  } else if constexpr (std::is_same_v<To, BFloat16> || std::is_same_v<To, Float16>) {
    float single;
    if constexpr (std::is_same_v<From, double>) {
      single = round_to_odd(x);
    } else {
      single = x;
    }
    if constexpr (std::is_same_v<To, BFloat16>) {
      return to_bfloat16(single);
    } else {
      return to_float16(single);
    }
  } else {
    return static_cast<To>(x);
  }
}

}  // namespace

void Add::check() const {
  require_tensor(kWhere, "a", a, y.dtype, y.shape);
  require_tensor(kWhere, "b", b, y.dtype, y.shape);
  require_tensor(kWhere, "y", y, y.dtype, y.shape);
}

void Zero::check() const {
  require_tensor(kWhere, "x", x, x.dtype, x.shape);
}

void Cast::check() const {
  require_tensor(kWhere, "x", x, x.dtype, y.shape);
  require_tensor(kWhere, "y", y, y.dtype, y.shape);
}

void run(CpuStream& stream, const Add& op) {
  if (run_widened(stream, op, [](auto& o) { return std::tie(o.y, o.a, o.b); })) {
    return;
  }
  dispatch_real(kWhere, op.y.dtype, [&]<class T>(T) {
    T* y = op.y.as<T>();
    const T* a = op.a.as<T>();
    const T* b = op.b.as<T>();
    parallel_elements(op.y.size(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
      for (std::int64_t i = begin; i < end; ++i) {
        y[i] = a[i] + b[i];
      }
    });
  });
}

void run(CpuStream&, const Zero& op) {
  std::memset(op.x.data, 0, op.x.bytes());
}

void run(CpuStream&, const Cast& op) {
  dispatch_floating(op.y.dtype, [&]<class To>(To) {
    dispatch_floating(op.x.dtype, [&]<class From>(From) {
      To* y = op.y.as<To>();
      const From* x = op.x.as<From>();
      parallel_elements(op.y.size(), [=](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          y[i] = convert<To>(x[i]);
        }
      });
    });
  });
}

}  // namespace bifocal
