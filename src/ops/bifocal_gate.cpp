// The gate that mixes far and near sight, on the CPU.
#include "ops/bifocal_gate.h"

#include "ops/vector_math.h"
#include "ops/widened.h"

namespace bifocal {

namespace {

constexpr const char* kWhere = "bifocal_gate";
constexpr std::int64_t kRowsTogether = 16;

// o and o (1 - o); the second stays exact where o rounds to 1.
template <class T>
struct Gate {
  T open, shut;

  explicit Gate(T x) : open(sigmoid(x)), shut(sigmoid(-x)) {}
};

template <class T>
void mix(const BifocalGateForward& op) {
  const std::int64_t dim = op.far.shape[2];
  const T* far = op.far.as<T>();
  const T* near = op.near.as<T>();
  const T* gate = op.gate.as<T>();
  T* y = op.y.as<T>();
  parallel_ranges(
      op.gate.size(), kRowsTogether, dim / 4, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row) {
          const Gate<T> o(gate[row]);
#pragma omp simd
          for (std::int64_t i = row * dim; i < (row + 1) * dim; ++i) {
            y[i] = o.open * far[i] + o.shut * near[i];
          }
        }
      });
}

// d_far = o d_y, d_near = (1 - o) d_y, d_gate = o (1 - o) d_y . (far - near).
template <class T>
void differentiate(const BifocalGateBackward& op) {
  const std::int64_t dim = op.far.shape[2];
  const T* d_y = op.d_y.as<T>();
  const T* far = op.far.as<T>();
  const T* near = op.near.as<T>();
  const T* gate = op.gate.as<T>();
  T* d_far = op.d_far.as<T>();
  T* d_near = op.d_near.as<T>();
  T* d_gate = op.d_gate.as<T>();
  parallel_ranges(
      op.gate.size(), kRowsTogether, dim / 2, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row) {
          const Gate<T> o(gate[row]);
          T sum = 0;
#pragma omp simd reduction(+ : sum)
          for (std::int64_t i = row * dim; i < (row + 1) * dim; ++i) {
            const T d = d_y[i];
            sum += d * (far[i] - near[i]);
            d_far[i] = o.open * d;
            d_near[i] = o.shut * d;
          }
          d_gate[row] = o.open * o.shut * sum;
        }
      });
}

void check_far(const ConstTensorView& far) {
  BIFOCAL_REQUIRE(far.shape.rank() == 3,
                  "[{}] far: wanted [tokens, heads, head_dim], got {}: pass a tensor of rank 3",
                  kWhere,
                  to_string(far.shape));
}

}  // namespace

void BifocalGateForward::check() const {
  check_far(far);
  require_tensor(kWhere, "y", y, y.dtype, far.shape);
  require_tensor(kWhere, "far", far, y.dtype, far.shape);
  require_tensor(kWhere, "near", near, y.dtype, far.shape);
  require_tensor(kWhere, "gate", gate, y.dtype, {far.shape[0], far.shape[1]});
}

void BifocalGateBackward::check() const {
  check_far(far);
  const DType type = d_far.dtype;
  require_tensor(kWhere, "d_far", d_far, type, far.shape);
  require_tensor(kWhere, "d_near", d_near, type, far.shape);
  require_tensor(kWhere, "d_gate", d_gate, type, {far.shape[0], far.shape[1]});
  require_tensor(kWhere, "d_y", d_y, type, far.shape);
  require_tensor(kWhere, "far", far, type, far.shape);
  require_tensor(kWhere, "near", near, type, far.shape);
  require_tensor(kWhere, "gate", gate, type, {far.shape[0], far.shape[1]});
}

void run(CpuStream& stream, const BifocalGateForward& op) {
  if (run_widened(stream, op, [](auto& o) { return std::tie(o.y, o.far, o.near, o.gate); })) {
    return;
  }
  dispatch_real(kWhere, op.y.dtype, [&](auto type) { mix<decltype(type)>(op); });
}

void run(CpuStream& stream, const BifocalGateBackward& op) {
  if (run_widened(stream, op, [](auto& o) {
        return std::tie(o.d_far, o.d_near, o.d_gate, o.d_y, o.far, o.near, o.gate);
      })) {
    return;
  }
  dispatch_real(kWhere, op.d_far.dtype, [&](auto type) { differentiate<decltype(type)>(op); });
}

}  // namespace bifocal
