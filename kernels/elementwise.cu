// Add, Zero and Cast: one read and one write of each element.
#include <algorithm>

#include "kernels/launch.cuh"
#include "ops/elementwise.h"

namespace bifocal {
namespace {

// Pointers carry no __restrict__: y may be a or b. A thread reads its group whole before it writes.
template <class T>
struct AddBody {
  T* y;
  const T* a;
  const T* b;

  template <int N>
  __device__ void vector(std::int64_t group) const {
    auto sum = load_floats<N>(a, group);
    const auto other = load_floats<N>(b, group);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sum.element[i] += other.element[i];
    }
    store_floats<N>(y, group, sum);
  }
};

template <class To, class From>
struct CastBody {
  To* y;
  const From* x;

  template <int N>
  __device__ void vector(std::int64_t group) const {
    store_floats<N>(y, group, load_floats<N>(x, group));
  }
};

}  // namespace

void run(CudaStream& stream, const Add& op) {
  require_type("add", "a", op.a, op.y.dtype);
  require_type("add", "b", op.b, op.y.dtype);
  dispatch_device("add", op.y.dtype, [&](auto zero) {
    using T = decltype(zero);
    const AddBody<T> body{op.y.as<T>(), op.a.as<T>(), op.b.as<T>()};
    const bool aligned = is_aligned(16, body.y, body.a, body.b);
    launch_flat<kVectorSize<T>>(stream, op.y.size(), aligned, body);
  });
}

void run(CudaStream& stream, const Zero& op) {
  if (op.x.size() > 0) {
    BIFOCAL_CUDA(cudaMemsetAsync(op.x.data, 0, op.x.bytes(), stream.handle()));
  }
}

void run(CudaStream& stream, const Cast& op) {
  dispatch_device("cast", op.y.dtype, [&](auto to_zero) {
    dispatch_device("cast", op.x.dtype, [&](auto from_zero) {
      using To = decltype(to_zero);
      using From = decltype(from_zero);
      const CastBody<To, From> body{op.y.as<To>(), op.x.as<From>()};
      // The narrower side has 16 bytes, the wider one twice as many.
      constexpr int kGroup = std::max(kVectorSize<To>, kVectorSize<From>);
      launch_flat<kGroup>(stream, op.y.size(), is_aligned(16, body.y, body.x), body);
    });
  });
}

}  // namespace bifocal
