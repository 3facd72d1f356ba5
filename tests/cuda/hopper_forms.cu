// The kernels of hopper_forms.h.
#include "cuda/hopper_forms.h"
#include "kernels/launch.cuh"
#include "kernels/wgmma.cuh"

namespace bifocal::test {
namespace {

using hopper::Operand;

[[maybe_unused]] constexpr int kSteps = kProductDepth / 16;

// A row-major [rows, columns] from global memory to a tile.
[[maybe_unused]] __device__ void fill_tile(BFloat16* tile,
                                           const BFloat16* from,
                                           int rows,
                                           int columns) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * columns;
       i += static_cast<int>(blockDim.x)) {
    tile[hopper::swizzled_offset(rows, i / columns, i % columns)] = from[i];
  }
}

template <int N, bool InRegisters, bool AColumns, bool BColumns>
__global__ void __launch_bounds__(hopper::kGroupThreads)
    product_kernel(float* d, const BFloat16* a, const BFloat16* b) {
#if BIFOCAL_HOPPER_CODE
  auto* a_tile = reinterpret_cast<BFloat16*>(hopper::swizzle_memory());
  BFloat16* b_tile = a_tile + kProductRows * kProductDepth;
  fill_tile(
      a_tile, a, AColumns ? kProductDepth : kProductRows, AColumns ? kProductRows : kProductDepth);
  fill_tile(b_tile, b, BColumns ? kProductDepth : N, BColumns ? N : kProductDepth);
  hopper::publish_shared();
  __syncthreads();

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
  const int column = lane % 4 * 2;
  float sum[N / 2];
  for (float& x : sum) {
    x = 1.0F;
  }
  std::uint32_t left[kSteps][4];
  if constexpr (InRegisters) {
    for (int k = 0; k < kSteps; ++k) {
      for (int i = 0; i < 4; ++i) {
        const int at = (row + i % 2 * 8) * kProductDepth + k * 16 + i / 2 * 8 + column;
        left[k][i] = *reinterpret_cast<const std::uint32_t*>(a + at);
      }
    }
  }
  const Operand right =
      BColumns ? Operand::by_columns(b_tile, kProductDepth) : Operand::by_rows(b_tile);
  const Operand in_shared =
      AColumns ? Operand::by_columns(a_tile, kProductDepth) : Operand::by_rows(a_tile);
  hopper::keep(sum);
  hopper::begin_products();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const Operand factor = right + (BColumns ? hopper::column_step(k) : hopper::row_step(N, k));
    if constexpr (InRegisters) {
      hopper::multiply<BColumns>(sum, left[k], factor, true);
    } else {
      hopper::multiply<AColumns, BColumns>(
          sum,
          in_shared + (AColumns ? hopper::column_step(k) : hopper::row_step(kProductRows, k)),
          factor,
          true);
    }
  }
  hopper::commit_products();
  hopper::wait_products<0>();
  hopper::keep(sum);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    d[(row + i % 4 / 2 * 8) * N + i / 4 * 8 + column + i % 2] = sum[i];
  }
#endif
}

template <int N, bool InRegisters, bool AColumns, bool BColumns>
void launch_product(CudaStream& stream, float* d, const BFloat16* a, const BFloat16* b) {
  constexpr int kBytes = hopper::kSwizzleAtomBytes + (kProductRows + (N + 63) / 64 * 64) *
                                                         kProductDepth *
                                                         static_cast<int>(sizeof(BFloat16));
  launch_kernel(stream,
                dim3(1),
                hopper::kGroupThreads,
                kBytes,
                product_kernel<N, InRegisters, AColumns, BColumns>,
                d,
                a,
                b);
}

template <int N>
void launch_form(
    CudaStream& stream, const ProductForm& form, float* d, const BFloat16* a, const BFloat16* b) {
  if (form.a_in_registers) {
    form.b_by_columns ? launch_product<N, true, false, true>(stream, d, a, b)
                      : launch_product<N, true, false, false>(stream, d, a, b);
  } else if (form.a_by_columns) {
    form.b_by_columns ? launch_product<N, false, true, true>(stream, d, a, b)
                      : launch_product<N, false, true, false>(stream, d, a, b);
  } else {
    form.b_by_columns ? launch_product<N, false, false, true>(stream, d, a, b)
                      : launch_product<N, false, false, false>(stream, d, a, b);
  }
}

int box_elements(const BoxCopy& copy) {
  return copy.box[0] * copy.box[1] * copy.box[2] * copy.box[3];
}

CUtensorMap map_of(const BoxCopy& copy, const BFloat16* tensor) {
  const auto dimension = [&](int i) {
    std::int64_t stride = 1;
    for (int j = 0; j < i; ++j) {
      stride *= copy.size[j];
    }
    return MapDimension{.size = copy.size[i], .stride = stride, .box = copy.box[i]};
  };
  if (copy.rank == 2) {
    return make_tensor_map(tensor, {dimension(0), dimension(1)});
  }
  if (copy.rank == 3) {
    return make_tensor_map(tensor, {dimension(0), dimension(1), dimension(2)});
  }
  return make_tensor_map(tensor, {dimension(0), dimension(1), dimension(2), dimension(3)});
}

__global__ void __launch_bounds__(hopper::kGroupThreads)
    load_kernel(BFloat16* box, const __grid_constant__ CUtensorMap map, BoxCopy copy, int size) {
#if BIFOCAL_HOPPER_CODE
  __shared__ hopper::Barrier arrived;
  auto* shared = reinterpret_cast<BFloat16*>(hopper::swizzle_memory());
  if (threadIdx.x == 0) {
    arrived.init(1);
    hopper::publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    arrived.arrive_expect(size * static_cast<int>(sizeof(BFloat16)));
    const int* at = copy.start;
    if (copy.rank == 2) {
      hopper::load_box(shared, map, arrived, at[0], at[1]);
    } else if (copy.rank == 3) {
      hopper::load_box(shared, map, arrived, at[0], at[1], at[2]);
    } else {
      hopper::load_box(shared, map, arrived, at[0], at[1], at[2], at[3]);
    }
  }
  arrived.wait(0);
  for (int i = static_cast<int>(threadIdx.x); i < size; i += hopper::kGroupThreads) {
    box[i] = shared[i];
  }
#endif
}

__global__ void __launch_bounds__(hopper::kGroupThreads) store_kernel(
    const __grid_constant__ CUtensorMap map, const BFloat16* box, BoxCopy copy, int size) {
#if BIFOCAL_HOPPER_CODE
  auto* shared = reinterpret_cast<BFloat16*>(hopper::swizzle_memory());
  for (int i = static_cast<int>(threadIdx.x); i < size; i += hopper::kGroupThreads) {
    shared[i] = box[i];
  }
  hopper::publish_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    hopper::store_box(map, shared, copy.start[0], copy.start[1], copy.start[2]);
    hopper::commit_stores();
    hopper::wait_stores_read<0>();
  }
#endif
}

[[maybe_unused]] constexpr int kStages = 3;
constexpr int kPieceBytes = 1024;
[[maybe_unused]] constexpr int kPieceElements = kPieceBytes / static_cast<int>(sizeof(BFloat16));

__global__ void __launch_bounds__(3 * hopper::kGroupThreads, 1)
    ring_kernel(BFloat16* y, const BFloat16* x, int pieces) {
#if BIFOCAL_HOPPER_CODE
  __shared__ hopper::Barrier full[kStages];
  __shared__ hopper::Barrier empty[kStages];
  __shared__ __align__(16) BFloat16 ring[kStages][kPieceElements];
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      empty[i].init(2 * hopper::kGroupThreads / kWarp * hopper::kWarpArrivals);
    }
    hopper::publish_barriers();
  }
  __syncthreads();
  hopper::RingPlace<kStages> place;
  const int group = static_cast<int>(threadIdx.x) / hopper::kGroupThreads;
  if (group == 0) {
    hopper::lower_registers<24>();
    if (threadIdx.x == 0) {
      for (int i = 0; i < pieces; ++i, place.advance()) {
        empty[place.stage].wait(place.parity ^ 1);
        full[place.stage].arrive_expect(kPieceBytes);
        hopper::load_bytes(
            ring[place.stage], x + i * kPieceElements, kPieceBytes, full[place.stage]);
      }
    }
  } else {
    hopper::raise_registers<240>();
    const int lane = static_cast<int>(threadIdx.x) % hopper::kGroupThreads;
    if (group == 2) {
      hopper::named_arrive(1, 2 * hopper::kGroupThreads);
    }
    for (int i = 0; i < pieces; ++i, place.advance()) {
      full[place.stage].wait(place.parity);
      hopper::named_sync(group, 2 * hopper::kGroupThreads);
      for (int j = lane; j < kPieceElements && i % 2 == group - 1; j += hopper::kGroupThreads) {
        y[i * kPieceElements + j] = ring[place.stage][j];
      }
      hopper::named_arrive(3 - group, 2 * hopper::kGroupThreads);
      hopper::arrive_warp(empty[place.stage]);
    }
  }
#endif
}

}  // namespace

void multiply_on_hopper(CudaStream& stream,
                        const ProductForm& form,
                        int n,
                        float* d,
                        const BFloat16* a,
                        const BFloat16* b) {
  switch (n) {
    case 16:
      return launch_form<16>(stream, form, d, a, b);
    case 32:
      return launch_form<32>(stream, form, d, a, b);
    case 64:
      return launch_form<64>(stream, form, d, a, b);
    case 96:
      return launch_form<96>(stream, form, d, a, b);
    case 128:
      return launch_form<128>(stream, form, d, a, b);
    case 192:
      return launch_form<192>(stream, form, d, a, b);
    default:
      return launch_form<256>(stream, form, d, a, b);
  }
}

void load_box_on_hopper(CudaStream& stream,
                        const BoxCopy& copy,
                        BFloat16* box,
                        const BFloat16* tensor) {
  const int size = box_elements(copy);
  launch_kernel(stream,
                dim3(1),
                hopper::kGroupThreads,
                hopper::kSwizzleAtomBytes + size * static_cast<int>(sizeof(BFloat16)),
                load_kernel,
                box,
                map_of(copy, tensor),
                copy,
                size);
}

void store_box_on_hopper(CudaStream& stream,
                         const BoxCopy& copy,
                         BFloat16* tensor,
                         const BFloat16* box) {
  const int size = box_elements(copy);
  launch_kernel(stream,
                dim3(1),
                hopper::kGroupThreads,
                hopper::kSwizzleAtomBytes + size * static_cast<int>(sizeof(BFloat16)),
                store_kernel,
                map_of(copy, tensor),
                box,
                copy,
                size);
}

void copy_through_ring_on_hopper(CudaStream& stream, BFloat16* y, const BFloat16* x, int pieces) {
  launch_kernel(stream, dim3(1), 3 * hopper::kGroupThreads, 0, ring_kernel, y, x, pieces);
}

}  // namespace bifocal::test
