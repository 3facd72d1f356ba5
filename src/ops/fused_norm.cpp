// On the CPU a pair is its two ops: memory is not what they wait for there.
#include "ops/fused_norm.h"

#include "ops/elementwise.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"
#include "ops/widened.h"

namespace bifocal {

namespace {

constexpr const char* kWhere = "fused_norm";

// [tokens, heads, head_dim] as [tokens * heads, head_dim].
Shape rows_of_heads(const Shape& shape) {
  return {shape[0] * shape[1], shape[2]};
}

}  // namespace

void AddRmsNorm::check() const {
  const Shape shape{a.shape[0], weight.shape[0]};
  require_tensor(kWhere, "weight", weight, y.dtype, {weight.shape[0]});
  require_tensor(kWhere, "a", a, y.dtype, shape);
  require_tensor(kWhere, "b", b, y.dtype, shape);
  require_tensor(kWhere, "y", y, y.dtype, shape);
  require_tensor(kWhere, "z", z, y.dtype, shape);
}

void NormRope::check() const {
  BIFOCAL_REQUIRE(x.shape.rank() == 3,
                  "[{}] x: wanted [tokens, heads, head_dim], got {}: pass a tensor of rank 3",
                  kWhere,
                  to_string(x.shape));
  require_tensor(kWhere, "x", x, y.dtype, y.shape);
  require_tensor(kWhere, "weight", weight, y.dtype, {x.shape[2]});
  RopeRotate{y, cos, sin}.check();
}

void run(CpuStream& stream, const AddRmsNorm& op) {
  if (run_widened(stream, op, [](auto& o) { return std::tie(o.y, o.z, o.a, o.b, o.weight); })) {
    return;
  }
  run(stream, Add{op.y, op.a, op.b});
  run(stream, RmsNormForward{op.z, op.y, op.weight, op.eps});
}

void run(CpuStream& stream, const NormRope& op) {
  if (run_widened(stream, op, [](auto& o) { return std::tie(o.y, o.x, o.weight, o.cos, o.sin); })) {
    return;
  }
  const Shape rows = rows_of_heads(op.x.shape);
  run(stream, RmsNormForward{op.y.reshape(rows), op.x.reshape(rows), op.weight, op.eps});
  run(stream, RopeRotate{op.y, op.cos, op.sin});
}

}  // namespace bifocal
