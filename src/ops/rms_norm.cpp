// RMSNorm, row by row.
#include "ops/rms_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/vector_math.h"
#include "ops/widened.h"

namespace bifocal {

namespace {

constexpr const char* kWhere = "rms_norm";

template <class T>
T inverse_rms(const T* x, std::int64_t width, double eps) {
  return static_cast<T>(
      1.0 / std::sqrt(static_cast<double>(dot(x, x, width)) / static_cast<double>(width) + eps));
}

template <class T>
void forward(const RmsNormForward& op) {
  const std::int64_t width = op.weight.shape[0];
  const double eps = op.eps;
  T* out = op.y.as<T>();
  const T* in = op.x.as<T>();
  const T* weight = op.weight.as<T>();
  parallel_ranges(op.y.shape[0], 1, width / 2, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const T* x = in + row * width;
      T* y = out + row * width;
      const T inverse = inverse_rms(x, width, eps);
#pragma omp simd
      for (std::int64_t i = 0; i < width; ++i) {
        y[i] = x[i] * inverse * weight[i];
      }
    }
  });
}

// With r = 1 / rms and g = weight d_y:
//   d_x = r g - x r^3 / width (x . g),   d_weight = sum over rows of d_y x r.
template <class T>
struct Backward {
  T* d_x;
  const T* d_y;
  const T* x;
  const T* weight;
  std::int64_t width;
  double eps;
  bool accumulate;

  // Adds the rows' part of d_weight to `sums` unless that is null.
  void rows(std::int64_t begin, std::int64_t end, double* sums) const {
    for (std::int64_t row = begin; row < end; ++row) {
      const T* x_row = x + row * width;
      const T* d_y_row = d_y + row * width;
      const T r = inverse_rms(x_row, width, eps);
      T along = 0;
#pragma omp simd reduction(+ : along)
      for (std::int64_t i = 0; i < width; ++i) {
        along += x_row[i] * (weight[i] * d_y_row[i]);
      }
      if (sums != nullptr) {
#pragma omp simd
        for (std::int64_t i = 0; i < width; ++i) {
          sums[i] += static_cast<double>(d_y_row[i] * (x_row[i] * r));
        }
      }
      const T along_x = along * r * r * r / static_cast<T>(width);
      if (accumulate) {
        input_row<true>(row, r, along_x);
      } else {
        input_row<false>(row, r, along_x);
      }
    }
  }

  template <bool kAccumulate>
  void input_row(std::int64_t row, T r, T along_x) const {
    T* to = d_x + row * width;
    const T* x_row = x + row * width;
    const T* d_y_row = d_y + row * width;
#pragma omp simd
    for (std::int64_t i = 0; i < width; ++i) {
      const T slope = r * (weight[i] * d_y_row[i]) - along_x * x_row[i];
      if constexpr (kAccumulate) {
        to[i] += slope;
      } else {
        to[i] = slope;
      }
    }
  }
};

template <class T>
void backward(const RmsNormBackward& op) {
  const std::int64_t width = op.weight.shape[0];
  const std::int64_t rows = op.d_x.shape[0];
  const Backward<T> part{op.d_x.as<T>(),
                         op.d_y.as<T>(),
                         op.x.as<T>(),
                         op.weight.as<T>(),
                         width,
                         op.eps,
                         op.accumulate};
  if (!op.d_weight) {
    parallel_ranges(rows, 1, width, [&](std::int64_t begin, std::int64_t end) {
      part.rows(begin, end, nullptr);
    });
    return;
  }
  // The blocks, hence the order of the sums, depend on the number of rows alone.
  constexpr std::int64_t kMostBlocks = 64;
  constexpr std::int64_t kFewestRows = 32;
  const std::int64_t block = std::max(kFewestRows, (rows + kMostBlocks - 1) / kMostBlocks);
  const std::int64_t blocks = (rows + block - 1) / block;
  std::vector<double> sums(static_cast<std::size_t>(blocks * width), 0.0);
  parallel_ranges(blocks, 1, block * width, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      part.rows(i * block, std::min(rows, (i + 1) * block), sums.data() + i * width);
    }
  });
  T* d_weight = op.d_weight.as<T>();
  for (std::int64_t i = 1; i < blocks; ++i) {
    axpy(sums.data(), 1.0, sums.data() + i * width, width);
  }
  for (std::int64_t i = 0; i < width && blocks > 0; ++i) {
    d_weight[i] += static_cast<T>(sums[static_cast<std::size_t>(i)]);
  }
}

}  // namespace

void RmsNormForward::check() const {
  const Shape shape{x.shape[0], weight.shape[0]};
  require_tensor(kWhere, "weight", weight, y.dtype, {weight.shape[0]});
  require_tensor(kWhere, "x", x, y.dtype, shape);
  require_tensor(kWhere, "y", y, y.dtype, shape);
}

void RmsNormBackward::check() const {
  const Shape shape{x.shape[0], weight.shape[0]};
  require_tensor(kWhere, "weight", weight, d_x.dtype, {weight.shape[0]});
  require_tensor(kWhere, "x", x, d_x.dtype, shape);
  require_tensor(kWhere, "d_y", d_y, d_x.dtype, shape);
  require_tensor(kWhere, "d_x", d_x, d_x.dtype, shape);
  if (d_weight) {
    require_tensor(kWhere, "d_weight", d_weight, sum_type(d_x.dtype), {weight.shape[0]});
  }
}

void run(CpuStream& stream, const RmsNormForward& op) {
  if (run_widened(stream, op, [](auto& o) { return std::tie(o.y, o.x, o.weight); })) {
    return;
  }
  dispatch_real(kWhere, op.y.dtype, [&]<class T>(T) { forward<T>(op); });
}

void run(CpuStream& stream, const RmsNormBackward& op) {
  if (run_widened(
          stream, op, [](auto& o) { return std::tie(o.d_x, o.d_weight, o.d_y, o.x, o.weight); })) {
    return;
  }
  dispatch_real(kWhere, op.d_x.dtype, [&]<class T>(T) { backward<T>(op); });
}

}  // namespace bifocal
