// Checks of collectives and sums in rank order.
#include "parallel/collective.h"

#include <type_traits>

namespace bifocal {

namespace {

double widen(double x) {
  return x;
}

float widen(float x) {
  return x;
}

float widen(BFloat16 x) {
  return to_float(x);
}

std::int64_t widen(std::int64_t x) {
  return x;
}

template <class T, class Wide>
T narrow(Wide x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return to_bfloat16(x);
  } else {
    return static_cast<T>(x);
  }
}

enum class Into { replace, add };

// Wide is the type that sums are formed in.
template <class Wide, class To, class From>
void sum_slices(To* target, const From* slices, std::int64_t n, int ranks, Into into) {
#pragma omp parallel for schedule(static) if (n > 65536)
  for (std::int64_t i = 0; i < n; ++i) {
    Wide sum = widen(slices[i]);
    for (int rank = 1; rank < ranks; ++rank) {
      sum += static_cast<Wide>(widen(slices[rank * n + i]));
    }
    if (into == Into::add) {
      sum += static_cast<Wide>(widen(target[i]));
    }
    target[i] = narrow<To>(sum);
  }
}

bool is_real(DType dtype) {
  return dtype == DType::f64 || dtype == DType::f32 || dtype == DType::bf16;
}

}  // namespace

void check_all_gather(const TensorView& whole, const ConstTensorView& part, int ranks) {
  BIFOCAL_REQUIRE(
      whole.dtype == part.dtype && whole.size() == part.size() * ranks,
      "[all_gather] wanted whole = {} ranks times part, got whole {} {} and part {} {}: every rank "
      "passes a part of the same size",
      ranks,
      name_of(whole.dtype),
      to_string(whole.shape),
      name_of(part.dtype),
      to_string(part.shape));
}

void check_reduce_scatter(const TensorView& part, const ConstTensorView& whole, int ranks) {
  BIFOCAL_REQUIRE(is_real(whole.dtype) && is_real(part.dtype) &&
                      size_of(part.dtype) >= size_of(whole.dtype) &&
                      whole.size() == part.size() * ranks,
                  "[reduce_scatter] wanted whole = {} ranks times part, both float64, float32 or "
                  "bfloat16 and part at least as wide, got whole {} {} and part {} {}",
                  ranks,
                  name_of(whole.dtype),
                  to_string(whole.shape),
                  name_of(part.dtype),
                  to_string(part.shape));
}

void check_all_reduce(const TensorView& data) {
  BIFOCAL_REQUIRE(is_real(data.dtype) || data.dtype == DType::i64,
                  "[all_reduce_sum] wanted float64, float32, bfloat16 or int64, got {}: convert "
                  "the tensor first",
                  name_of(data.dtype));
}

void add_in_rank_order(const TensorView& part, const void* slices, DType dtype, int ranks) {
  const std::int64_t n = part.size();
  const auto add = [&]<class Wide, class To>(Wide /*sum type*/, To* target) {
    switch (dtype) {
      case DType::f64:
        return sum_slices<double>(target, static_cast<const double*>(slices), n, ranks, Into::add);
      case DType::f32:
        return sum_slices<Wide>(target, static_cast<const float*>(slices), n, ranks, Into::add);
      default:
        BIFOCAL_ASSERT(dtype == DType::bf16);
        return sum_slices<Wide>(target, static_cast<const BFloat16*>(slices), n, ranks, Into::add);
    }
  };
  switch (part.dtype) {
    case DType::f64:
      return add(double{}, part.as<double>());
    case DType::f32:
      return add(float{}, part.as<float>());
    default:
      return add(float{}, part.as<BFloat16>());
  }
}

void sum_in_rank_order(const TensorView& data, const void* slices, int ranks) {
  const std::int64_t n = data.size();
  const auto sum = [&]<class Wide, class T>(Wide /*sum type*/, T* target) {
    sum_slices<Wide>(target, static_cast<const T*>(slices), n, ranks, Into::replace);
  };
  switch (data.dtype) {
    case DType::f64:
      return sum(double{}, data.as<double>());
    case DType::f32:
      return sum(float{}, data.as<float>());
    case DType::i64:
      return sum(std::int64_t{}, data.as<std::int64_t>());
    default:
      return sum(float{}, data.as<BFloat16>());
  }
}

}  // namespace bifocal
