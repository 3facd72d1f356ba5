// Copies on the host.
#include "ops/transfer.h"

#include <cstring>
#include <variant>

namespace bifocal {

namespace {

void check_copy(const TensorView& y, const ConstTensorView& x) {
  require_tensor("transfer", "x", x, y.dtype, y.shape);
  require_tensor("transfer", "y", y, y.dtype, y.shape);
}

void copy(const TensorView& y, const ConstTensorView& x) {
  if (x.size() > 0) {
    std::memcpy(y.data, x.data, x.bytes());
  }
}

}  // namespace

void Upload::check() const {
  check_copy(y, x);
}

void Download::check() const {
  check_copy(y, x);
}

void Copy::check() const {
  check_copy(y, x);
}

void run(CpuStream& /*stream*/, const Upload& op) {
  copy(op.y, op.x);
}

void run(CpuStream& /*stream*/, const Download& op) {
  copy(op.y, op.x);
}

void run(CpuStream& /*stream*/, const Copy& op) {
  copy(op.y, op.x);
}

void synchronize(CpuStream& /*stream*/) {}

void synchronize(Stream& stream) {
  std::visit([](auto* backend) { synchronize(*backend); }, stream.device);
}

}  // namespace bifocal
