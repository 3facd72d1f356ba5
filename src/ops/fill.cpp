// Tensors made of nothing.
#include "ops/fill.h"

#include <algorithm>
#include <type_traits>

#include "core/random.h"
#include "ops/vector_math.h"

namespace bifocal {

namespace {

constexpr const char* kWhere = "fill";

template <class T>
T rounded(double value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return to_bfloat16(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

// Calls function(T{}) for the types that can be filled.
template <class Function>
void dispatch(DType type, const Function& function) {
  if (type == DType::bf16) {
    function(BFloat16{});
  } else {
    dispatch_real(kWhere, type, function);
  }
}

}  // namespace

void Fill::check() const {
  require_tensor(kWhere, "x", x, x.dtype, x.shape);
}

void FillNormal::check() const {
  require_tensor(kWhere, "x", x, x.dtype, x.shape);
}

void run(CpuStream&, const Fill& op) {
  dispatch(op.x.dtype, [&]<class T>(T) {
    T* x = op.x.as<T>();
    const T value = rounded<T>(op.value);
    parallel_ranges(op.x.size(), 64, 1, [=](std::int64_t begin, std::int64_t end) {
      std::fill(x + begin, x + end, value);
    });
  });
}

void run(CpuStream&, const FillNormal& op) {
  dispatch(op.x.dtype, [&]<class T>(T) {
    T* x = op.x.as<T>();
    parallel_ranges(op.x.size(), 64, 40, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::uint64_t index = op.begin + static_cast<std::uint64_t>(i);
        x[i] = rounded<T>(op.deviation * random_normal(op.seed, op.stream, index));
      }
    });
  });
}

}  // namespace bifocal
