// Softmax features: one product per head, then the softmax of each row.
#include "ops/feature_map.h"

#include <memory>

#include "ops/blas.h"
#include "ops/vector_math.h"
#include "ops/widened.h"

namespace bifocal {

namespace {

constexpr std::int64_t kTokenGrain = 64;
constexpr std::int64_t kFeatureBlock = 64;

struct Sizes {
  std::int64_t tokens, heads, x_heads, dim;

  std::int64_t x_head(std::int64_t head) const { return head / (heads / x_heads); }

  // About the nanoseconds one token takes in one product over all heads.
  std::int64_t work() const { return 1 + heads * dim * dim / 32; }
};

Sizes sizes_of(const ConstTensorView& y, const ConstTensorView& x) {
  return {y.shape[0], y.shape[1], x.shape[1], y.shape[2]};
}

void check_inputs(const char* where,
                  const ConstTensorView& y,
                  const ConstTensorView& x,
                  const ConstTensorView& weight) {
  const std::int64_t tokens = y.shape[0];
  const std::int64_t heads = y.shape[1];
  const std::int64_t dim = y.shape[2];
  const std::int64_t x_heads = x.shape[1];
  BIFOCAL_REQUIRE(y.shape.rank() == 3 && x.shape.rank() == 3 && x_heads > 0 && heads > 0 &&
                      dim > 0 && heads % x_heads == 0,
                  "[{}] wanted y [tokens, heads, head_dim] and x [tokens, x_heads, head_dim] with "
                  "heads a multiple of x_heads, got {} and {}: repeat whole heads",
                  where,
                  to_string(y.shape),
                  to_string(x.shape));
  require_tensor(where, "y", y, y.dtype, {tokens, heads, dim});
  require_tensor(where, "x", x, y.dtype, {tokens, x_heads, dim});
  require_tensor(where, "weight", weight, y.dtype, {heads, dim, dim});
}

template <class T>
void forward(const FeatureMapForward& op) {
  const Sizes s = sizes_of(op.y, op.x);
  T* y = op.y.as<T>();
  const T* x = op.x.as<T>();
  const T* weight = op.weight.as<T>();
  const auto rows = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t head = 0; head < s.heads; ++head) {
      gemm(Transpose::no,
           Transpose::yes,
           end - begin,
           s.dim,
           s.dim,
           1,
           x + (begin * s.x_heads + s.x_head(head)) * s.dim,
           s.x_heads * s.dim,
           weight + head * s.dim * s.dim,
           s.dim,
           0,
           y + (begin * s.heads + head) * s.dim,
           s.heads * s.dim);
    }
    for (std::int64_t row = begin * s.heads; row < end * s.heads; ++row) {
      softmax_row(y + row * s.dim, y + row * s.dim, s.dim);
    }
  };
  parallel_ranges(s.tokens, kTokenGrain, s.work(), rows);
}

// With z = weight x: d_z = y (d_y - <d_y, y>) for rows [begin, end), and d_x += d_z weight.
template <class T>
void backward_rows(
    const FeatureMapBackward& op, const Sizes& s, T* d_z, std::int64_t begin, std::int64_t end) {
  const T* y = op.y.as<T>();
  const T* d_y = op.d_y.as<T>();
  for (std::int64_t row = begin * s.heads; row < end * s.heads; ++row) {
    const T* y_row = y + row * s.dim;
    const T* d_y_row = d_y + row * s.dim;
    T* d_z_row = d_z + row * s.dim;
    const T mean = dot(d_y_row, y_row, s.dim);
    for (std::int64_t i = 0; i < s.dim; ++i) {
      d_z_row[i] = y_row[i] * (d_y_row[i] - mean);
    }
  }
  for (std::int64_t head = 0; head < s.heads; ++head) {
    gemm(Transpose::no,
         Transpose::no,
         end - begin,
         s.dim,
         s.dim,
         1,
         d_z + (begin * s.heads + head) * s.dim,
         s.heads * s.dim,
         op.weight.as<T>() + head * s.dim * s.dim,
         s.dim,
         1,
         op.d_x.as<T>() + (begin * s.x_heads + s.x_head(head)) * s.dim,
         s.x_heads * s.dim);
  }
}

template <class T>
void backward(const FeatureMapBackward& op) {
  const Sizes s = sizes_of(op.y, op.x);
  const auto size = static_cast<std::size_t>(op.y.size());
  const auto d_z = std::make_unique_for_overwrite<T[]>(size);
  parallel_ranges(s.tokens, kTokenGrain, s.work(), [&](std::int64_t begin, std::int64_t end) {
    backward_rows(op, s, d_z.get(), begin, end);
  });
  // Every block of features sums over all tokens on one thread: the sum's order never changes.
  const std::int64_t blocks = (s.dim + kFeatureBlock - 1) / kFeatureBlock;
  const auto weights = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t head = item / blocks;
      const std::int64_t first = item % blocks * kFeatureBlock;
      gemm(Transpose::yes,
           Transpose::no,
           std::min(kFeatureBlock, s.dim - first),
           s.dim,
           s.tokens,
           1,
           d_z.get() + head * s.dim + first,
           s.heads * s.dim,
           op.x.as<T>() + s.x_head(head) * s.dim,
           s.x_heads * s.dim,
           1,
           op.d_weight.as<T>() + (head * s.dim + first) * s.dim,
           s.dim);
    }
  };
  parallel_ranges(s.heads * blocks, 1, 1 + s.tokens * s.dim, weights);
}

}  // namespace

void FeatureMapForward::check() const {
  check_inputs("feature_map", y, x, weight);
}

void FeatureMapBackward::check() const {
  constexpr auto kWhere = "feature_map backward";
  check_inputs(kWhere, y, x, weight);
  require_tensor(kWhere, "d_y", d_y, y.dtype, y.shape);
  require_tensor(kWhere, "d_x", d_x, y.dtype, x.shape);
  const bool wide = y.dtype == DType::bf16 && d_weight.dtype == DType::f32;
  require_tensor(kWhere, "d_weight", d_weight, wide ? DType::f32 : y.dtype, weight.shape);
}

void run(CpuStream& stream, const FeatureMapForward& op) {
  if (run_widened(stream, op, [](auto& o) { return std::tie(o.y, o.x, o.weight); })) {
    return;
  }
  dispatch_real("feature_map", op.y.dtype, [&](auto zero) { forward<decltype(zero)>(op); });
}

void run(CpuStream& stream, const FeatureMapBackward& op) {
  if (run_widened(stream, op, [](auto& o) {
        return std::tie(o.d_x, o.d_weight, o.d_y, o.y, o.x, o.weight);
      })) {
    return;
  }
  dispatch_real(
      "feature_map backward", op.y.dtype, [&](auto zero) { backward<decltype(zero)>(op); });
}

}  // namespace bifocal
