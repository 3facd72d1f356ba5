// Gated MLP activation.
#include "ops/swiglu.h"

#include "ops/vector_math.h"
#include "ops/widened.h"

namespace bifocal {

namespace {

constexpr const char* kWhere = "swiglu";
constexpr std::int64_t kGrain = 64;

template <class T>
void forward(const SwigluForward& op) {
  T* y = op.y.as<T>();
  const T* gate = op.gate.as<T>();
  const T* up = op.up.as<T>();
  parallel_ranges(op.y.size(), kGrain, 1, [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) {
      y[i] = gate[i] * sigmoid(gate[i]) * up[i];
    }
  });
}

template <class T>
void backward(const SwigluBackward& op) {
  T* d_gate = op.d_gate.as<T>();
  T* d_up = op.d_up.as<T>();
  const T* d_y = op.d_y.as<T>();
  const T* gate = op.gate.as<T>();
  const T* up = op.up.as<T>();
  parallel_ranges(op.d_y.size(), kGrain, 1, [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) {
      const T g = gate[i];
      const T s = sigmoid(g);
      const T d = d_y[i];
      const T u = up[i];
      d_up[i] = d * (g * s);
      d_gate[i] = d * u * (s * (T{1} + g * (T{1} - s)));
    }
  });
}

}  // namespace

void SwigluForward::check() const {
  const Shape shape{y.shape[0], y.shape[1]};
  require_tensor(kWhere, "y", y, y.dtype, shape);
  require_tensor(kWhere, "gate", gate, y.dtype, shape);
  require_tensor(kWhere, "up", up, y.dtype, shape);
}

void SwigluBackward::check() const {
  const Shape shape{d_y.shape[0], d_y.shape[1]};
  require_tensor(kWhere, "d_y", d_y, d_y.dtype, shape);
  require_tensor(kWhere, "gate", gate, d_y.dtype, shape);
  require_tensor(kWhere, "up", up, d_y.dtype, shape);
  require_tensor(kWhere, "d_gate", d_gate, d_y.dtype, shape);
  require_tensor(kWhere, "d_up", d_up, d_y.dtype, shape);
}

void run(CpuStream& stream, const SwigluForward& op) {
  if (run_widened(stream, op, [](auto& o) { return std::tie(o.y, o.gate, o.up); })) {
    return;
  }
  dispatch_real(kWhere, op.y.dtype, [&]<class T>(T) { forward<T>(op); });
}

void run(CpuStream& stream, const SwigluBackward& op) {
  if (run_widened(
          stream, op, [](auto& o) { return std::tie(o.d_gate, o.d_up, o.d_y, o.gate, o.up); })) {
    return;
  }
  dispatch_real(kWhere, op.d_y.dtype, [&]<class T>(T) { backward<T>(op); });
}

}  // namespace bifocal
