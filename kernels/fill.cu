// One write of each element.
#include "kernels/launch.cuh"
#include "kernels/random.cuh"
#include "ops/fill.h"

namespace bifocal {
namespace {

template <class T>
struct FillBody {
  T* x;
  float value;

  template <int N>
  __device__ void vector(std::int64_t group) const {
    Vector<T, N> v;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v.element[i] = store_as<T>(value);
    }
    store_vector<N>(x, group, v);
  }
};

// Made once for a whole model, in double as on the CPU: arithmetic takes longer than the writes.
template <class T>
struct FillNormalBody {
  T* x;
  std::uint64_t seed, stream, begin;
  double deviation;

  template <int N>
  __device__ void vector(std::int64_t group) const {
    const DeviceRandom random(seed, stream);
    const std::uint64_t index = begin + static_cast<std::uint64_t>(group);
    x[group] = store_as<T>(static_cast<float>(deviation * random.normal(index)));
  }
};

}  // namespace

void run(CudaStream& stream, const Fill& op) {
  dispatch_device("fill", op.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const FillBody<T> body{op.x.as<T>(), static_cast<float>(op.value)};
    launch_flat<kVectorSize<T>>(stream, op.x.size(), is_aligned(16, body.x), body);
  });
}

void run(CudaStream& stream, const FillNormal& op) {
  dispatch_device("fill", op.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const FillNormalBody<T> body{op.x.as<T>(), op.seed, op.stream, op.begin, op.deviation};
    launch_flat<1>(stream, op.x.size(), true, body);
  });
}

}  // namespace bifocal
