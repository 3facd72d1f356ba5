// What op tests share: a stream, a Memory and tensors of seeded normals.
#pragma once

#include <gtest/gtest.h>
#include <omp.h>

#include "core/memory.h"
#include "core/stream.h"
#include "ops/run.h"
#include "support/compare.h"
#include "support/fill.h"
#include "support/gradient_check.h"

namespace bifocal::test {

class OpTest : public testing::Test {
 protected:
  Tensor normal(DType dtype, const Shape& shape, std::uint64_t seed, double deviation = 1.0) {
    return normal_tensor(memory_, dtype, shape, seed, deviation);
  }

  Tensor empty(DType dtype, const Shape& shape) {
    Tensor x = memory_.empty(Region::activations, dtype, shape);
    // What an op must overwrite starts as something no test expects.
    if (dtype == DType::f32 || dtype == DType::f64) {
      fill(x, [](std::int64_t) { return std::numeric_limits<double>::quiet_NaN(); });
    }
    return x;
  }

  Tensor zeros(DType dtype, const Shape& shape) {
    return memory_.zeros(Region::activations, dtype, shape);
  }

  Tensor doubles(const ConstTensorView& x) { return copy_as(memory_, DType::f64, x); }

  Memory memory_;
  CpuStream cpu_;
  Stream stream_{&cpu_};
};

// Runs function on a team of `threads`, then restores the number of threads.
template <class Function>
void with_threads(int threads, const Function& function) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(threads);
  function();
  omp_set_num_threads(before);
}

}  // namespace bifocal::test
