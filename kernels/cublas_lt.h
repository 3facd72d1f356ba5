// Matrix products by cuBLASLt: one handle, one workspace, one choice of algorithm for each problem.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <tuple>

#include <cublasLt.h>

#include "core/dtype.h"

namespace bifocal {

// d = op(a) op(b) (+ d) (+ bias), all column-major: d [m, n], op(a) [m, k], op(b) [k, n]. Leading
// dimensions are the numbers of rows as stored. a and b are of type `input`, both float32 or
// bfloat16; d is of type `output`: the same, or float32 beside bfloat16. Sums are float32.
struct MatrixProduct {
  void* d = nullptr;
  const void* a = nullptr;
  const void* b = nullptr;
  const void* bias = nullptr;  // [m], type of d, added to each column; optional, not beside `adds`
  std::int64_t m = 0, n = 0, k = 0;
  bool a_transposed = false, b_transposed = false;
  bool adds = false;  // to what d holds
  DType input = DType::f32, output = DType::f32;
};

// Of one device and one stream. The same problem (sizes, types, alignments) runs by the same
// algorithm in the same order of sums each time: equal bits.
class CublasLt {
 public:
  CublasLt();
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  // Queues the product; m, n, k > 0. False, and nothing queued, where no algorithm adds this bias.
  // Throws Error where there is none without a bias.
  [[nodiscard]] bool multiply(cudaStream_t stream, const MatrixProduct& product);

 private:
  struct Plan;
  using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, int, unsigned, unsigned>;

  static Key key_of(const MatrixProduct& product);
  std::unique_ptr<Plan> make_plan(const MatrixProduct& product) const;

  cublasLtHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

}  // namespace bifocal
