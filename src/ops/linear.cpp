// Matrix products on BLAS: every thread computes its own block of the result.
#include "ops/linear.h"

#include <algorithm>
#include <array>

#include "ops/blas.h"
#include "ops/vector_math.h"
#include "ops/widened.h"

namespace bifocal {

namespace {

constexpr const char* kWhere = "linear";
// Blocks of the result start at multiples of this many rows or columns: whole BLAS register tiles.
constexpr std::int64_t kGrain = 16;
constexpr std::int64_t kMultiplyAddsPerNanosecond = 40;

// Calls block(row range, column range) for blocks that tile a [rows, columns] result, one per
// thread. The longer side is cut, so that a single token is as parallel as a long row.
template <class Block>
void deal_blocks(std::int64_t rows, std::int64_t columns, std::int64_t depth, const Block& block) {
  const auto work = [&](std::int64_t width) { return width * depth / kMultiplyAddsPerNanosecond; };
  if (rows >= columns || rows >= kGrain * omp_get_max_threads()) {
    parallel_ranges(rows, kGrain, work(columns), [&](std::int64_t begin, std::int64_t end) {
      block(Range{begin, end}, Range{0, columns});
    });
  } else {
    parallel_ranges(columns, kGrain, work(rows) + 1, [&](std::int64_t begin, std::int64_t end) {
      block(Range{0, rows}, Range{begin, end});
    });
  }
}

std::int64_t length(Range range) {
  return range.end - range.begin;
}

// d_bias += column sums: rows in order, a double for each column.
template <class T>
void add_column_sums(T* d_bias, const T* d_y, std::int64_t rows, std::int64_t columns) {
  constexpr std::int64_t kBlock = 64;
  parallel_ranges(columns, kBlock, rows, [=](std::int64_t first, std::int64_t last) {
    for (std::int64_t begin = first; begin < last; begin += kBlock) {
      const std::int64_t width = std::min(kBlock, last - begin);
      std::array<double, kBlock> sums{};
      for (std::int64_t row = 0; row < rows; ++row) {
        const T* from = d_y + row * columns + begin;
#pragma omp simd
        for (std::int64_t i = 0; i < width; ++i) {
          sums[static_cast<std::size_t>(i)] += static_cast<double>(from[i]);
        }
      }
      for (std::int64_t i = 0; i < width; ++i) {
        d_bias[begin + i] += static_cast<T>(sums[static_cast<std::size_t>(i)]);
      }
    }
  });
}

template <class T>
void forward(const LinearForward& op) {
  const std::int64_t rows = op.y.shape[0];
  const std::int64_t out = op.weight.shape[0];
  const std::int64_t in = op.weight.shape[1];
  T* y = op.y.as<T>();
  const T* x = op.x.as<T>();
  const T* weight = op.weight.as<T>();
  const T* bias = op.bias ? op.bias.as<T>() : nullptr;
  deal_blocks(rows, out, in, [=](Range row, Range column) {
    T* block = y + row.begin * out + column.begin;
    if (bias != nullptr) {
      for (std::int64_t i = 0; i < length(row); ++i) {
        std::copy(bias + column.begin, bias + column.end, block + i * out);
      }
    }
    gemm(Transpose::no,
         Transpose::yes,
         length(row),
         length(column),
         in,
         1,
         x + row.begin * in,
         in,
         weight + column.begin * in,
         in,
         bias != nullptr ? 1 : 0,
         block,
         out);
  });
}

template <class T>
void backward_input(const LinearBackwardInput& op) {
  const std::int64_t rows = op.d_x.shape[0];
  const std::int64_t out = op.weight.shape[0];
  const std::int64_t in = op.weight.shape[1];
  T* d_x = op.d_x.as<T>();
  const T* d_y = op.d_y.as<T>();
  const T* weight = op.weight.as<T>();
  const T beta = op.accumulate ? 1 : 0;
  deal_blocks(rows, in, out, [=](Range row, Range column) {
    gemm(Transpose::no,
         Transpose::no,
         length(row),
         length(column),
         out,
         1,
         d_y + row.begin * out,
         out,
         weight + column.begin,
         in,
         beta,
         d_x + row.begin * in + column.begin,
         in);
  });
}

template <class T>
void backward_weight(const LinearBackwardWeight& op) {
  const std::int64_t rows = op.x.shape[0];
  const std::int64_t out = op.d_weight.shape[0];
  const std::int64_t in = op.d_weight.shape[1];
  T* d_weight = op.d_weight.as<T>();
  const T* d_y = op.d_y.as<T>();
  const T* x = op.x.as<T>();
  deal_blocks(out, in, rows, [=](Range row, Range column) {
    gemm(Transpose::yes,
         Transpose::no,
         length(row),
         length(column),
         rows,
         1,
         d_y + row.begin,
         out,
         x + column.begin,
         in,
         1,
         d_weight + row.begin * in + column.begin,
         in);
  });
  if (op.d_bias) {
    add_column_sums(op.d_bias.as<T>(), d_y, rows, out);
  }
}

// [rows, columns] of the tensor that fixes an op's sizes.
void require_matrix(const char* name, const ConstTensorView& tensor) {
  BIFOCAL_REQUIRE(tensor.shape.rank() == 2,
                  "[{}] {}: wanted two dimensions, got {}: reshape the tensor",
                  kWhere,
                  name,
                  to_string(tensor.shape));
}

}  // namespace

void LinearForward::check() const {
  require_matrix("x", x);
  require_matrix("weight", weight);
  const DType result = y.dtype == x.dtype ? x.dtype : sum_type(x.dtype);
  require_tensor(kWhere, "x", x, x.dtype, {x.shape[0], weight.shape[1]});
  require_tensor(kWhere, "weight", weight, x.dtype, weight.shape);
  require_tensor(kWhere, "y", y, result, {x.shape[0], weight.shape[0]});
  if (bias) {
    require_tensor(kWhere, "bias", bias, x.dtype, {weight.shape[0]});
  }
}

void LinearBackwardInput::check() const {
  require_matrix("d_y", d_y);
  require_matrix("weight", weight);
  require_tensor(kWhere, "d_y", d_y, d_x.dtype, {d_y.shape[0], weight.shape[0]});
  require_tensor(kWhere, "weight", weight, d_x.dtype, weight.shape);
  require_tensor(kWhere, "d_x", d_x, d_x.dtype, {d_y.shape[0], weight.shape[1]});
}

void LinearBackwardWeight::check() const {
  require_matrix("d_y", d_y);
  require_matrix("x", x);
  const DType sums = sum_type(x.dtype);
  require_tensor(kWhere, "d_y", d_y, x.dtype, {x.shape[0], d_y.shape[1]});
  require_tensor(kWhere, "x", x, x.dtype, x.shape);
  require_tensor(kWhere, "d_weight", d_weight, sums, {d_y.shape[1], x.shape[1]});
  if (d_bias) {
    require_tensor(kWhere, "d_bias", d_bias, sums, {d_y.shape[1]});
  }
}

void run(CpuStream& stream, const LinearForward& op) {
  if (run_widened(stream, op, [](auto& o) { return std::tie(o.y, o.x, o.weight, o.bias); })) {
    return;
  }
  dispatch_real(kWhere, op.x.dtype, [&]<class T>(T) { forward<T>(op); });
}

void run(CpuStream& stream, const LinearBackwardInput& op) {
  if (run_widened(stream, op, [](auto& o) { return std::tie(o.d_x, o.d_y, o.weight); })) {
    return;
  }
  dispatch_real(kWhere, op.d_x.dtype, [&]<class T>(T) { backward_input<T>(op); });
}

void run(CpuStream& stream, const LinearBackwardWeight& op) {
  if (run_widened(stream, op, [](auto& o) { return std::tie(o.d_weight, o.d_bias, o.d_y, o.x); })) {
    return;
  }
  dispatch_real(kWhere, op.x.dtype, [&]<class T>(T) { backward_weight<T>(op); });
}

}  // namespace bifocal
