// What only Hopper (compute capability 9.0) has: products of a warpgroup on shared memory (wgmma),
// the copy engine for boxes of tensors (TMA), barriers in shared memory that count bytes, registers
// moved between warpgroups. A kernel that uses them has its body under #if BIFOCAL_HOPPER_CODE.
//
// Tiles are of bfloat16 in columns of kSwizzleColumns = 64: rows of 128 bytes, the next 64 columns
// behind all rows of the first ones. Eight rows are an atom of 1024 bytes, to which every tile is
// aligned; chunk c (16 bytes) of row r lies in place c ^ (r % 8). A box of 64 columns with
// kSwizzle128 comes in this form; one box a column block.
#pragma once

#include <cstdint>

#include "kernels/tensor_core.cuh"
#include "kernels/tensor_map.h"
#include "kernels/warp.cuh"

// The architecture that is compiled has these instructions.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define BIFOCAL_HOPPER_CODE 1
#else
#define BIFOCAL_HOPPER_CODE 0
#endif

namespace bifocal::hopper {

inline constexpr int kSwizzleColumns = 64;
inline constexpr int kSwizzleRowBytes = 128;
inline constexpr int kSwizzleAtomBytes = 1024;
inline constexpr int kGroupThreads = 128;  // of a warpgroup
inline constexpr int kGroupRows = 64;      // of its product

// The thread's warpgroup in the block, in a form that the compiler knows to be the same for a warp.
__device__ inline int warpgroup_id() {
  return __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
}

// Where column `column` of row `row` lies in a tile of `rows` rows, in elements.
__host__ __device__ constexpr int swizzled_offset(int rows, int row, int column) {
  const int block = column / kSwizzleColumns;
  const int chunk = column % kSwizzleColumns / 8;
  return (block * rows + row) * kSwizzleColumns + (chunk ^ (row & 7)) * 8 + column % 8;
}

// The block's dynamic shared memory from its first multiple of 1024 bytes: ask for
// kSwizzleAtomBytes more than is used.
__device__ inline unsigned char* swizzle_memory() {
  unsigned char* memory = dynamic_shared();
  const std::uint32_t past = shared_address(memory) % kSwizzleAtomBytes;
  return memory + (past == 0 ? 0 : kSwizzleAtomBytes - past);
}

// --- Barriers -----------------------------------------------------------------------------------

// A barrier in shared memory. A phase ends when `arrivals` arrivals and all announced bytes have
// come; phases have parity 0, 1, 0, ... What a thread wrote before it arrives is seen by those that
// wait.
class Barrier {
 public:
  // By one thread; publish_barriers() and __syncthreads() follow.
  __device__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals)
                 : "memory");
  }

  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }

  // An arrival that announces bytes of copies.
  __device__ void arrive_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
  }

  // Returns once the phase of this parity has ended: at once if the running phase has the other
  // parity.
  __device__ void wait(int parity) {
    while (!has_ended(parity)) {
    }
  }

  __device__ std::uint32_t address() const { return shared_address(&state_); }

 private:
  __device__ bool has_ended(int parity) const {
    std::uint32_t ended = 0;
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
        "selp.u32 %0, 1, 0, ended;\n"
        "}\n"
        : "=r"(ended)
        : "r"(address()), "r"(parity)
        : "memory");
    return ended != 0;
  }

  std::uint64_t state_;
};

// Makes initialised barriers known to the copy engine.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrivals of a warp by arrive_warp(). One lane is enough, but racecheck does not follow the order
// from the other lanes through __syncwarp(): builds for it let each lane arrive.
#if defined(BIFOCAL_EVERY_LANE_ARRIVES)
inline constexpr int kWarpArrivals = kWarp;
#else
inline constexpr int kWarpArrivals = 1;
#endif

// What all lanes accessed before is accessed before what follows the end of the phase.
__device__ inline void arrive_warp(Barrier& barrier) {
  __syncwarp();
  if (kWarpArrivals == kWarp || lane_id() == 0) {
    barrier.arrive();
  }
}

// A position in a ring of `Stages` barriers and the parity of its round: a consumer waits for
// `parity`, a producer for `parity ^ 1`, which passes in the first round.
template <int Stages>
struct RingPlace {
  int stage = 0;
  int parity = 0;

  __device__ void advance() {
    if (++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Barrier `id` (1 to 15; 0 is __syncthreads) of `threads` threads, of which some only arrive.
__device__ inline void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ inline void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- Copies by the copy engine ------------------------------------------------------------------

// Writes of this thread to shared memory come before later reads by wgmma or the copy engine. Each
// writing thread calls it ahead of the barrier.
__device__ inline void publish_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The map's box at the given coordinates, fastest first, to shared memory, in units of elements.
// What lies outside of the tensor becomes zero and counts as bytes of the barrier like the rest.
__device__ inline void load_box(void* to, const CUtensorMap& map, Barrier& barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
      "l"(&map),
      "r"(barrier.address()),
      "r"(x),
      "r"(y)
      : "memory");
}

__device__ inline void load_box(
    void* to, const CUtensorMap& map, Barrier& barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
      "l"(&map),
      "r"(barrier.address()),
      "r"(x),
      "r"(y),
      "r"(z)
      : "memory");
}

__device__ inline void load_box(
    void* to, const CUtensorMap& map, Barrier& barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
      "l"(&map),
      "r"(barrier.address()),
      "r"(x),
      "r"(y),
      "r"(z),
      "r"(w)
      : "memory");
}

// `bytes` (a multiple of 16) from global to shared memory, both on multiples of 16 bytes.
__device__ inline void load_bytes(void* to, const void* from, int bytes, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(__cvta_generic_to_global(from)),
      "r"(bytes),
      "r"(barrier.address())
      : "memory");
}

// Shared memory to the map's box; what lies outside of the tensor is not written. The writes of
// `from` are published before. commit_stores() closes a group of stores of this thread.
__device__ inline void store_box(const CUtensorMap& map, const void* from, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(shared_address(from)),
      "r"(x),
      "r"(y),
      "r"(z)
      : "memory");
}

__device__ inline void store_bytes(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(to)),
               "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}

__device__ inline void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// At most Left groups of this thread's stores still read shared memory.
template <int Left>
__device__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Left) : "memory");
}

// --- Registers ----------------------------------------------------------------------------------

// The registers of each thread of a warpgroup from here on, a multiple of 8; all its warps call it.
// Over all warpgroups no more than at the start, where 384 threads have 168 each: 24 and twice 240.
template <int Count>
__device__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

template <int Count>
__device__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

}  // namespace bifocal::hopper
