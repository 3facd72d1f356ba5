// Typed matrix products over CBLAS. The threads are ours: BLAS works on the calling thread alone.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cblas.h>
#include <omp.h>

namespace bifocal {

enum class Transpose : std::uint8_t { no, yes };

// Tells OpenBLAS once to start no threads. Its OpenMP build may change the number of OpenMP threads
// when told so, hence the restore.
inline void keep_blas_on_calling_thread() {
  static const bool once = [] {
    const int threads = omp_get_max_threads();
    openblas_set_num_threads(1);
    omp_set_num_threads(threads);
    return true;
  }();
  static_cast<void>(once);
}

// c = alpha op(a) op(b) + beta c, row-major; op(a) is [m, k], op(b) [k, n], c [m, n]; lda, ldb and
// ldc are the distances between stored rows. With beta 0, c need not be initialised. Any of m, n, k
// may be 0.
template <class T>
void gemm(Transpose trans_a,  // NOLINT(readability-function-size): the arguments of BLAS
          Transpose trans_b,
          std::int64_t m,
          std::int64_t n,
          std::int64_t k,
          std::type_identity_t<T> alpha,
          const T* a,
          std::int64_t lda,
          const T* b,
          std::int64_t ldb,
          std::type_identity_t<T> beta,
          T* c,
          std::int64_t ldc) {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>);
  if (m == 0 || n == 0) {
    return;
  }
  if (k == 0) {
    for (std::int64_t row = 0; row < m; ++row) {
      for (std::int64_t column = 0; column < n; ++column) {
        c[row * ldc + column] = beta == T{0} ? T{0} : beta * c[row * ldc + column];
      }
    }
    return;
  }
  keep_blas_on_calling_thread();
  const auto flag = [](Transpose t) { return t == Transpose::yes ? CblasTrans : CblasNoTrans; };
  const auto size = [](std::int64_t x) { return static_cast<blasint>(x); };
  const auto call = [&](auto* function) {
    function(CblasRowMajor,
             flag(trans_a),
             flag(trans_b),
             size(m),
             size(n),
             size(k),
             alpha,
             a,
             size(lda),
             b,
             size(ldb),
             beta,
             c,
             size(ldc));
  };
  if constexpr (std::is_same_v<T, float>) {
    call(cblas_sgemm);
  } else {
    call(cblas_dgemm);
  }
}

}  // namespace bifocal
