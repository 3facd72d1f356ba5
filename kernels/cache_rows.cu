// Rows in and out of caches of keys and values.
#include <cstdint>

#include "kernels/launch.cuh"
#include "ops/decode_attention.h"

namespace bifocal {
namespace {

constexpr int kThreads = 128;

// Block i copies row i in units of Unit, unless a later row takes its slot.
template <class Unit>
__global__ void __launch_bounds__(kThreads) cache_write_kernel(Unit* cache,
                                                               const Unit* rows,
                                                               const std::int32_t* slots,
                                                               int count,
                                                               std::int64_t capacity,
                                                               std::int64_t width) {
  const int row = static_cast<int>(blockIdx.x);
  const std::int32_t slot = slots[row];
  int is_taken = slot < 0 || slot >= capacity ? 1 : 0;
  for (int later = row + 1 + static_cast<int>(threadIdx.x); later < count; later += kThreads) {
    is_taken |= slots[later] == slot ? 1 : 0;
  }
  if (__syncthreads_or(is_taken) != 0) {
    return;
  }
  for (std::int64_t i = threadIdx.x; i < width; i += kThreads) {
    cache[slot * width + i] = rows[row * width + i];
  }
}

template <class Unit>
__global__ void __launch_bounds__(kThreads) cache_read_kernel(Unit* rows,
                                                              const Unit* cache,
                                                              const std::int32_t* slots,
                                                              std::int64_t capacity,
                                                              std::int64_t width) {
  const std::int64_t row = blockIdx.x;
  const std::int32_t slot = slots[row];
  const bool is_inside = slot >= 0 && slot < capacity;
  for (std::int64_t i = threadIdx.x; i < width; i += kThreads) {
    rows[row * width + i] = is_inside ? cache[slot * width + i] : Unit{};
  }
}

// Calls function(Unit{}, rows, units of a row) with the widest unit that both tensors allow, if
// there are rows.
template <class Op, class Function>
void dispatch_rows(const Op& op, Function&& function) {
  const std::int64_t rows = op.rows.shape[0];
  const std::int64_t bytes = op.rows.shape[1] * static_cast<std::int64_t>(size_of(op.rows.dtype));
  if (rows == 0) {
    return;
  }
  if (is_aligned(16, op.cache.data, op.rows.data) && bytes % 16 == 0) {
    function(uint4{}, rows, bytes / 16);
  } else {
    function(static_cast<unsigned char>(0), rows, bytes);
  }
}

}  // namespace

void run(CudaStream& stream, const CacheWrite& op) {
  dispatch_rows(op, [&](auto zero, std::int64_t rows, std::int64_t width) {
    using Unit = decltype(zero);
    launch_kernel(stream,
                  grid_of(rows),
                  kThreads,
                  0,
                  cache_write_kernel<Unit>,
                  static_cast<Unit*>(op.cache.data),
                  static_cast<const Unit*>(op.rows.data),
                  op.slots.as<std::int32_t>(),
                  static_cast<int>(rows),
                  op.cache.shape[0],
                  width);
  });
}

void run(CudaStream& stream, const CacheRead& op) {
  dispatch_rows(op, [&](auto zero, std::int64_t rows, std::int64_t width) {
    using Unit = decltype(zero);
    launch_kernel(stream,
                  grid_of(rows),
                  kThreads,
                  0,
                  cache_read_kernel<Unit>,
                  static_cast<Unit*>(op.rows.data),
                  static_cast<const Unit*>(op.cache.data),
                  op.slots.as<std::int32_t>(),
                  op.cache.shape[0],
                  width);
  });
}

}  // namespace bifocal
