// Products of a few rows in register tiles of 4 outputs x up to 3 rows. Every sum of every tile has
// one vector accumulator that takes the inputs in order, so tiles of all sizes round alike.
#include "ops/decode_linear.h"

#include <algorithm>
#include <cstring>

#include "ops/vector_math.h"

namespace bifocal {

namespace {

constexpr const char* kWhere = "decode_linear";
constexpr std::int64_t kOutputs = 4;
constexpr std::int64_t kRows = 3;  // 4 x 3 sums, 3 inputs and a weight: the 16 registers of AVX2

// 32 bytes of T. The compiler's vectors rather than loops it may vectorise: sums must stay in
// registers.
template <class T>
struct VectorOf;

template <>
struct VectorOf<float> {
  using Type = float __attribute__((vector_size(32)));
};

template <>
struct VectorOf<double> {
  using Type = double __attribute__((vector_size(32)));
};

template <class T>
using Vector = typename VectorOf<T>::Type;

template <class T>
constexpr std::int64_t kLanes = 32 / static_cast<std::int64_t>(sizeof(T));

template <class T>
Vector<T> load(const T* from) {
  Vector<T> x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

// bf16 is the upper half of a float.
template <class T>
Vector<float> load(const BFloat16* from) {
  using Halves = std::uint16_t __attribute__((vector_size(16)));
  using Words = std::uint32_t __attribute__((vector_size(32)));
  Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  const Words words = __builtin_convertvector(halves, Words) << 16;
  Vector<float> x;
  std::memcpy(&x, &words, sizeof(x));
  return x;
}

// The first `count` elements, then zeros.
template <class T, class Stored>
Vector<T> load_part(const Stored* from, std::int64_t count) {
  Stored padded[kLanes<T>] = {};  // NOLINT(*-avoid-c-arrays): copied into a vector
  std::memcpy(padded, from, static_cast<std::size_t>(count) * sizeof(Stored));
  return load<T>(padded);
}

template <class T>
T sum_of_lanes(Vector<T> x) {
  if constexpr (kLanes<T> == 8) {
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
  } else {
    return (x[0] + x[2]) + (x[1] + x[3]);
  }
}

template <class T, class Stored>
struct Product {
  T* y;
  const T* x;
  const Stored* weight;
  const T* bias;  // may be null
  std::int64_t in, x_stride, y_stride;

  static constexpr std::int64_t kAhead = 16384 / static_cast<std::int64_t>(sizeof(Stored));

  // Outputs [output, output + kOut) of rows [row, row + kRow).
  template <std::int64_t kOut, std::int64_t kRow>
  void tile(std::int64_t output, std::int64_t row) const {
    const Stored* w = weight + output * in;
    const T* from = x + row * x_stride;
    Vector<T> sums[kOut][kRow] = {};  // NOLINT(*-avoid-c-arrays): vectors lose attributes in arrays
    const auto add = [&](const auto& weight_at, const auto& input_at) {
      Vector<T> inputs[kRow];  // NOLINT(*-avoid-c-arrays)
      for (std::int64_t r = 0; r < kRow; ++r) {
        inputs[r] = input_at(r);
      }
      for (std::int64_t o = 0; o < kOut; ++o) {
        const Vector<T> factor = weight_at(o);
        for (std::int64_t r = 0; r < kRow; ++r) {
          sums[o][r] += factor * inputs[r];
        }
      }
    };
    const std::int64_t whole = in - in % kLanes<T>;
    for (std::int64_t i = 0; i < whole; i += kLanes<T>) {
      if (row == 0) {
        prefetch<kOut>(w + i);
      }
      add([&](std::int64_t o) { return load<T>(w + o * in + i); },
          [&](std::int64_t r) { return load<T>(from + r * x_stride + i); });
    }
    if (whole < in) {
      add([&](std::int64_t o) { return load_part<T>(w + o * in + whole, in - whole); },
          [&](std::int64_t r) { return load_part<T>(from + r * x_stride + whole, in - whole); });
    }
    for (std::int64_t o = 0; o < kOut; ++o) {
      for (std::int64_t r = 0; r < kRow; ++r) {
        const T start = bias == nullptr ? T{0} : bias[output + o];
        y[(row + r) * y_stride + output + o] = start + sum_of_lanes<T>(sums[o][r]);
      }
    }
  }

  // The weights of the tile after the next loads, from memory: rows are short, and the processor's
  // own prefetching begins anew with each.
  template <std::int64_t kOut>
  void prefetch(const Stored* w) const {
    const std::int64_t ahead = std::min<std::int64_t>(kOut * in, kAhead);
    for (std::int64_t o = 0; o < kOut; ++o) {
      __builtin_prefetch(w + o * in + ahead);
    }
  }

  template <std::int64_t kOut>
  void outputs(std::int64_t output, std::int64_t rows) const {
    std::int64_t row = 0;
    for (; row + kRows <= rows; row += kRows) {
      tile<kOut, kRows>(output, row);
    }
    if (rows - row == 2) {
      tile<kOut, 2>(output, row);
    } else if (rows - row == 1) {
      tile<kOut, 1>(output, row);
    }
  }

  // Outputs [begin, end) of all rows; the weights of four outputs stay in the first cache.
  void range(std::int64_t begin, std::int64_t end, std::int64_t rows) const {
    std::int64_t output = begin;
    for (; output + kOutputs <= end; output += kOutputs) {
      outputs<kOutputs>(output, rows);
    }
    for (; output < end; ++output) {
      outputs<1>(output, rows);
    }
  }
};

// Calls function(T{}, Stored{}) for the types of a product.
template <class Function>
void dispatch_product(DType type, DType stored, const Function& function) {
  dispatch_real(kWhere, type, [&]<class T>(T) {
    if constexpr (std::is_same_v<T, float>) {
      if (stored == DType::bf16) {
        function(T{}, BFloat16{});
        return;
      }
    }
    function(T{}, T{});
  });
}

void require_weight(const ConstTensorView& weight, DType type, const Shape& shape) {
  const bool is_narrow = weight.dtype == DType::bf16 && type == DType::f32;
  require_tensor(kWhere, "weight", weight, is_narrow ? DType::bf16 : type, shape);
}

}  // namespace

void DecodeLinear::check() const {
  BIFOCAL_REQUIRE(x.shape.rank() == 2 && weight.shape.rank() == 2,
                  "[{}] wanted x [rows, in] and weight [out, in], got {} and {}: reshape them",
                  kWhere,
                  to_string(x.shape),
                  to_string(weight.shape));
  const DType result = y.dtype == x.dtype ? x.dtype : sum_type(x.dtype);
  require_weight(weight, x.dtype, weight.shape);
  require_tensor(kWhere, "x", x, x.dtype, {x.shape[0], weight.shape[1]});
  require_tensor(kWhere, "y", y, result, {x.shape[0], weight.shape[0]});
  if (bias) {
    const DType bias_type = bias.dtype == y.dtype ? y.dtype : x.dtype;
    require_tensor(kWhere, "bias", bias, bias_type, {weight.shape[0]});
  }
}

void DecodeFeatureMap::check() const {
  BIFOCAL_REQUIRE(
      y.shape.rank() == 3 && x.shape.rank() == 3 && x.shape[1] > 0 && y.shape[1] % x.shape[1] == 0,
      "[{}] wanted y [rows, heads, head_dim] and x [rows, x_heads, head_dim] with heads a "
      "multiple of x_heads, got {} and {}: repeat whole heads",
      kWhere,
      to_string(y.shape),
      to_string(x.shape));
  const std::int64_t dim = y.shape[2];
  require_weight(weight, y.dtype, {y.shape[1], dim, dim});
  require_tensor(kWhere, "x", x, y.dtype, {y.shape[0], x.shape[1], dim});
  require_tensor(kWhere, "y", y, y.dtype, y.shape);
}

void run(CpuStream& /*stream*/, const DecodeLinear& op) {
  const std::int64_t rows = op.x.shape[0];
  const std::int64_t out = op.weight.shape[0];
  const std::int64_t in = op.weight.shape[1];
  dispatch_product(op.y.dtype, op.weight.dtype, [&]<class T, class Stored>(T, Stored) {
    const Product<T, Stored> product{op.y.as<T>(),
                                     op.x.as<T>(),
                                     op.weight.as<Stored>(),
                                     op.bias ? op.bias.as<T>() : nullptr,
                                     in,
                                     in,
                                     out};
    const std::int64_t work = 1 + in * (1 + rows) / 32;
    parallel_ranges(out, kOutputs, work, [&](std::int64_t begin, std::int64_t end) {
      product.range(begin, end, rows);
    });
  });
}

void run(CpuStream& /*stream*/, const DecodeFeatureMap& op) {
  const std::int64_t rows = op.y.shape[0];
  const std::int64_t heads = op.y.shape[1];
  const std::int64_t x_heads = op.x.shape[1];
  const std::int64_t dim = op.y.shape[2];
  dispatch_product(op.y.dtype, op.weight.dtype, [&]<class T, class Stored>(T, Stored) {
    T* y = op.y.as<T>();
    const auto of_heads = [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t head = begin; head < end; ++head) {
        const Product<T, Stored> product{y + head * dim,
                                         op.x.as<T>() + head / (heads / x_heads) * dim,
                                         op.weight.as<Stored>() + head * dim * dim,
                                         nullptr,
                                         dim,
                                         x_heads * dim,
                                         heads * dim};
        product.range(0, dim, rows);
        for (std::int64_t row = 0; row < rows; ++row) {
          T* features = y + (row * heads + head) * dim;
          softmax_row(features, features, dim);
        }
      }
    };
    parallel_ranges(heads, 1, 1 + dim * dim * (1 + rows) / 32, of_heads);
  });
}

}  // namespace bifocal
