// Deterministic reductions.
#include "ops/reduce.h"

#include <algorithm>
#include <vector>

#include "ops/vector_math.h"

namespace bifocal {

namespace {

constexpr const char* kWhere = "reduce";

template <class T>
double sum_of_squares(const T* x, std::int64_t size) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < size; ++i) {
    sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  }
  return sum;
}

}  // namespace

void SumOfSquares::check() const {
  require_tensor(kWhere, "sum", sum, DType::f64, {1});
  require_tensor(kWhere, "x", x, x.dtype, x.shape);
}

void KeptSum::check() const {
  require_tensor(kWhere, "sum", sum, DType::f64, {1});
  require_tensor(kWhere, "x", x, DType::f64, {x.size()});
  require_tensor(kWhere, "keep", keep, DType::u8, {x.size()});
}

void run(CpuStream&, const SumOfSquares& op) {
  constexpr std::int64_t kBlock = 4096;
  const std::int64_t size = op.x.size();
  const std::int64_t blocks = (size + kBlock - 1) / kBlock;
  std::vector<double> sums(static_cast<std::size_t>(blocks));
  dispatch_real(kWhere, op.x.dtype, [&]<class T>(T) {
    const T* x = op.x.as<T>();
    parallel_ranges(blocks, 1, kBlock / 4, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        sums[static_cast<std::size_t>(i)] =
            sum_of_squares(x + i * kBlock, std::min(kBlock, size - i * kBlock));
      }
    });
  });
  double total = 0.0;
  for (const double sum : sums) {
    total += sum;
  }
  *op.sum.as<double>() += total;
}

void run(CpuStream&, const KeptSum& op) {
  const auto* x = op.x.as<double>();
  const auto* keep = op.keep.as<std::uint8_t>();
  double sum = 0.0;
  for (std::int64_t i = 0; i < op.x.size(); ++i) {
    if (keep[i] != 0) {
      sum += x[i];
    }
  }
  *op.sum.as<double>() += sum;
}

}  // namespace bifocal
