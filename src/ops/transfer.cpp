// Copies of host memory.
#include "ops/transfer.h"

#include <cstring>

namespace bifocal {

namespace {

constexpr const char* kWhere = "transfer";

void copy(const TensorView& y, const ConstTensorView& x) {
  if (y.size() > 0) {
    std::memcpy(y.data, x.data, y.bytes());
  }
}

}  // namespace

void Upload::check() const {
  require_tensor(kWhere, "x", x, y.dtype, y.shape);
}

void Download::check() const {
  require_tensor(kWhere, "x", x, y.dtype, y.shape);
}

void Copy::check() const {
  require_tensor(kWhere, "x", x, y.dtype, y.shape);
}

void CopyHeads::check() const {
  BIFOCAL_REQUIRE(y.shape.rank() == 3 && x.shape.rank() == 3,
                  "[{}] wanted heads as [tokens, heads, head_dim], got y {} and x {}",
                  kWhere,
                  to_string(y.shape),
                  to_string(x.shape));
  require_tensor(kWhere, "x", x, y.dtype, {y.shape[0], x.shape[1], y.shape[2]});
  BIFOCAL_REQUIRE(count >= 0 && y_first >= 0 && y_first + count <= y.shape[1] && x_first >= 0 &&
                      x_first + count <= x.shape[1],
                  "[{}] wanted {} heads from {} of x {} and from {} of y {}: they are not there",
                  kWhere,
                  count,
                  x_first,
                  to_string(x.shape),
                  y_first,
                  to_string(y.shape));
}

void run(CpuStream&, const Upload& op) {
  copy(op.y, op.x);
}

void run(CpuStream&, const Download& op) {
  copy(op.y, op.x);
}

void run(CpuStream&, const Copy& op) {
  copy(op.y, op.x);
}

void run(CpuStream&, const CopyHeads& op) {
  const std::int64_t head_bytes = op.y.shape[2] * static_cast<std::int64_t>(size_of(op.y.dtype));
  auto* to = static_cast<std::byte*>(op.y.data) + op.y_first * head_bytes;
  const auto* from = static_cast<const std::byte*>(op.x.data) + op.x_first * head_bytes;
  const auto bytes = static_cast<std::size_t>(op.count * head_bytes);
  if (bytes == 0) {
    return;
  }
  for (std::int64_t token = 0; token < op.y.shape[0]; ++token) {
    std::memcpy(
        to + token * op.y.shape[1] * head_bytes, from + token * op.x.shape[1] * head_bytes, bytes);
  }
}

void synchronize(CpuStream&) {}

void synchronize(Stream& stream) {
  std::visit([](auto* backend) { synchronize(*backend); }, stream.device);
}

}  // namespace bifocal
