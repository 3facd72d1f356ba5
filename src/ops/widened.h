// bfloat16 on the CPU, the reference for devices: an op runs in double on copies of its tensors,
// and what it stores is rounded once, to bfloat16 or, as sums, to float32. As slow as its copies.
#pragma once

#include <tuple>
#include <utility>
#include <vector>

#include "core/memory.h"
#include "ops/elementwise.h"

namespace bifocal {

// Tensors of one op as double.
class WidenedTensors {
 public:
  explicit WidenedTensors(CpuStream& cpu) : cpu_(cpu) {}

  void widen(ConstTensorView& x) {
    if (is_narrow(x)) {
      x = copy_of(x);
    }
  }

  void widen(TensorView& y) {
    if (is_narrow(y)) {
      const TensorView wide = copy_of(y);
      stored_.emplace_back(y, wide);
      y = wide;
    }
  }

  // Rounds outputs into their tensors.
  void store() {
    for (const auto& [y, wide] : stored_) {
      run(cpu_, Cast{.y = y, .x = wide});
    }
  }

 private:
  static bool is_narrow(const ConstTensorView& x) {
    return x && (x.dtype == DType::bf16 || x.dtype == DType::f32);
  }

  TensorView copy_of(const ConstTensorView& x) {
    copies_.push_back(memory_.empty(Region::scratch, DType::f64, x.shape));
    run(cpu_, Cast{.y = copies_.back(), .x = x});
    return copies_.back();
  }

  CpuStream& cpu_;
  Memory memory_;
  std::vector<Tensor> copies_;
  std::vector<std::pair<TensorView, TensorView>> stored_;
};

// Whether any of the op's tensors is of bfloat16: it then has run. tensors(op): references to all
// its tensors of floating point, as std::tie returns them.
template <class Op, class Tensors>
bool run_widened(CpuStream& cpu, const Op& op, const Tensors& tensors) {
  const bool is_bfloat16 =
      std::apply([](const auto&... each) { return ((each && each.dtype == DType::bf16) || ...); },
                 tensors(op));
  if (!is_bfloat16) {
    return false;
  }
  Op wide = op;
  WidenedTensors widened(cpu);
  std::apply([&](auto&... each) { (widened.widen(each), ...); }, tensors(wide));
  run(cpu, wide);
  widened.store();
  return true;
}

}  // namespace bifocal
