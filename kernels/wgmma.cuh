// Products of a warpgroup: d [64, N] += a [64, 16] b [16, N] of bfloat16, float32 sums, with
// N = 16, 32, 64, 96, 128, 192 or 256. Tiles are as in hopper.cuh.
//
// Warp w of the four holds rows 16 w to 16 w + 15, as multiply_add in tensor_core.cuh: with
// g = lane / 4 and i = 2 (lane % 4), d[4 j + 0..3] = (g, 8 j + i), (g, 8 j + i + 1), (g + 8, 8 j +
// i), (g + 8, 8 j + i + 1); a in registers = columns (g, i), (g + 8, i), (g, i + 8), (g + 8, i +
// 8), each with its right neighbour. So d of 16 columns, packed, is an a of the next product.
//
// Order of calls: begin_products(); multiply()...; commit_products(); wait_products<n>(). Between
// the first and the wait nothing may touch d or an a in registers. The compiler may move what it
// computes across these calls: keep(d) before begin_products() and after wait_products() forbids
// it.
#pragma once

#include <cstdint>

#include "kernels/hopper.cuh"

namespace bifocal::hopper {

// An operand in shared memory: its address, the distance of column blocks and of groups of eight
// rows, all in 16 bytes, and the swizzle.
class Operand {
 public:
  // Tile [rows, columns], rows = rows of the product's a or columns of its b; 16 columns of the
  // tile are the depth of one product. `tile` may point at any multiple of eight rows of it.
  static __device__ Operand by_rows(const BFloat16* tile) { return Operand(tile, 16); }

  // Tile [rows, columns], 16 rows are the depth of one product; `rows` of the whole tile, in which
  // `tile` points at a multiple of eight rows of a column block.
  static __device__ Operand by_columns(const BFloat16* tile, int rows) {
    return Operand(tile, rows * kSwizzleRowBytes);
  }

  // The operand `bytes` further on.
  __device__ Operand operator+(int bytes) const {
    Operand moved = *this;
    moved.low_ += static_cast<std::uint32_t>(bytes / 16);
    return moved;
  }

  __device__ std::uint64_t bits() const {
    constexpr std::uint64_t kHigh = kSwizzleAtomBytes / 16 | 1U << 30;
    return kHigh << 32 | low_;
  }

 private:
  __device__ Operand(const BFloat16* tile, int block_bytes)
      : low_((shared_address(tile) & 0x3ffffU) >> 4 | static_cast<std::uint32_t>(block_bytes / 16)
                                                          << 16) {}

  std::uint32_t low_;
};

// Offset in bytes of step k (16 columns) of a by_rows tile of `rows` rows.
__host__ __device__ constexpr int row_step(int rows, int k) {
  return k / 4 * rows * kSwizzleRowBytes + k % 4 * 32;
}

// Offset in bytes of step k (16 rows) of a by_columns tile.
__host__ __device__ constexpr int column_step(int k) {
  return k * 16 * kSwizzleRowBytes;
}

__device__ inline void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// At most Left committed groups still run.
template <int Left>
__device__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}

template <int N>
__device__ void keep(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    asm volatile("" : "+f"(d[i])::"memory");
  }
}

template <int N>
__device__ void keep(std::uint32_t (&a)[N][4]) {
#pragma unroll
  for (int i = 0; i < 4 * N; ++i) {
    asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
  }
}

// clang-format off
// Registers of d in the text of an instruction, sixteen at a time, and as operands.
#define BIFOCAL_D8_0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define BIFOCAL_D16_0 BIFOCAL_D8_0 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define BIFOCAL_D16_1 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define BIFOCAL_D16_2 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define BIFOCAL_D16_3 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define BIFOCAL_D16_4 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define BIFOCAL_D16_5 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define BIFOCAL_D16_6 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define BIFOCAL_D16_7 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define BIFOCAL_TEXT_8 BIFOCAL_D8_0
#define BIFOCAL_TEXT_16 BIFOCAL_D16_0
#define BIFOCAL_TEXT_32 BIFOCAL_TEXT_16 BIFOCAL_D16_1
#define BIFOCAL_TEXT_48 BIFOCAL_TEXT_32 BIFOCAL_D16_2
#define BIFOCAL_TEXT_64 BIFOCAL_TEXT_48 BIFOCAL_D16_3
#define BIFOCAL_TEXT_96 BIFOCAL_TEXT_64 BIFOCAL_D16_4 BIFOCAL_D16_5
#define BIFOCAL_TEXT_128 BIFOCAL_TEXT_96 BIFOCAL_D16_6 BIFOCAL_D16_7
#define BIFOCAL_F4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define BIFOCAL_F8(i) BIFOCAL_F4(i), BIFOCAL_F4((i) + 4)
#define BIFOCAL_F16(i) BIFOCAL_F8(i), BIFOCAL_F8((i) + 8)
#define BIFOCAL_F32(i) BIFOCAL_F16(i), BIFOCAL_F16((i) + 16)
#define BIFOCAL_F48(i) BIFOCAL_F32(i), BIFOCAL_F16((i) + 32)
#define BIFOCAL_F64(i) BIFOCAL_F32(i), BIFOCAL_F32((i) + 32)
#define BIFOCAL_F96(i) BIFOCAL_F64(i), BIFOCAL_F32((i) + 64)
#define BIFOCAL_F128(i) BIFOCAL_F64(i), BIFOCAL_F64((i) + 64)

// Of N columns and R = N / 2 registers; the other operands' numbers are R, R + 1, ...
#define BIFOCAL_PRODUCT_SHARED(N, R, A, B, P, TA, TB)                                           \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #P ", 0;\n"                             \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" BIFOCAL_TEXT_##R    \
               "}, %" #A ", %" #B ", add, 1, 1, %" #TA ", %" #TB ";\n}\n"                       \
               : BIFOCAL_F##R(0)                                                                \
               : "l"(a.bits()), "l"(b.bits()), "r"(static_cast<int>(add)), "n"(int{TransposedA}),   \
                 "n"(int{TransposedB}))
#define BIFOCAL_PRODUCT_REGISTERS(N, R, A0, A1, A2, A3, B, P, TB)                               \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #P ", 0;\n"                             \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" BIFOCAL_TEXT_##R    \
               "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", add, 1, 1, %" #TB ";\n}\n"   \
               : BIFOCAL_F##R(0)                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()),                     \
                 "r"(static_cast<int>(add)), "n"(int{TransposedB}))

// clang-format on

// d = a b, or d += a b with `add`, both factors in shared memory. A factor is transposed when its
// operand is by_columns.
template <bool TransposedA, bool TransposedB, int R>
__device__ void multiply(float (&d)[R], Operand a, Operand b, bool add) {
  if constexpr (R == 8) {
    BIFOCAL_PRODUCT_SHARED(16, 8, 8, 9, 10, 11, 12);
  } else if constexpr (R == 16) {
    BIFOCAL_PRODUCT_SHARED(32, 16, 16, 17, 18, 19, 20);
  } else if constexpr (R == 32) {
    BIFOCAL_PRODUCT_SHARED(64, 32, 32, 33, 34, 35, 36);
  } else if constexpr (R == 48) {
    BIFOCAL_PRODUCT_SHARED(96, 48, 48, 49, 50, 51, 52);
  } else if constexpr (R == 64) {
    BIFOCAL_PRODUCT_SHARED(128, 64, 64, 65, 66, 67, 68);
  } else if constexpr (R == 96) {
    BIFOCAL_PRODUCT_SHARED(192, 96, 96, 97, 98, 99, 100);
  } else {
    static_assert(R == 128, "no such width");
    BIFOCAL_PRODUCT_SHARED(256, 128, 128, 129, 130, 131, 132);
  }
}

// The same with a in registers.
template <bool TransposedB, int R>
__device__ void multiply(float (&d)[R], const std::uint32_t (&a)[4], Operand b, bool add) {
  if constexpr (R == 8) {
    BIFOCAL_PRODUCT_REGISTERS(16, 8, 8, 9, 10, 11, 12, 13, 14);
  } else if constexpr (R == 16) {
    BIFOCAL_PRODUCT_REGISTERS(32, 16, 16, 17, 18, 19, 20, 21, 22);
  } else if constexpr (R == 32) {
    BIFOCAL_PRODUCT_REGISTERS(64, 32, 32, 33, 34, 35, 36, 37, 38);
  } else if constexpr (R == 48) {
    BIFOCAL_PRODUCT_REGISTERS(96, 48, 48, 49, 50, 51, 52, 53, 54);
  } else if constexpr (R == 64) {
    BIFOCAL_PRODUCT_REGISTERS(128, 64, 64, 65, 66, 67, 68, 69, 70);
  } else if constexpr (R == 96) {
    BIFOCAL_PRODUCT_REGISTERS(192, 96, 96, 97, 98, 99, 100, 101, 102);
  } else {
    static_assert(R == 128, "no such width");
    BIFOCAL_PRODUCT_REGISTERS(256, 128, 128, 129, 130, 131, 132, 133, 134);
  }
}

#undef BIFOCAL_PRODUCT_SHARED
#undef BIFOCAL_PRODUCT_REGISTERS

}  // namespace bifocal::hopper
