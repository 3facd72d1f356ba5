// Sliding attention on tensor cores, forward: a block holds 128 packed query rows and goes through
// their keys in tiles, with a running maximum; the next tile is under way meanwhile.
#include <cmath>

#include "kernels/attention_tile.cuh"
#include "kernels/launch.cuh"

namespace bifocal {
namespace {

// What one block takes: Warps warps of 16 MT rows, tiles of Keys keys.
template <int D>
struct ForwardShape {
  static constexpr int kMT = D == 256 ? 1 : 2;
  static constexpr int kWarps = D == 256 ? 8 : 4;
  static constexpr int kKeys = D == 64 ? 64 : 32;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kMT * kWarps;
  static constexpr int kQueryBytes = kRows * D * static_cast<int>(sizeof(BFloat16));
  using Block = QueryBlock<D, kRows, kKeys, kThreads>;
  static constexpr int kBytes = kQueryBytes + Block::kKeyBytes + Block::kSpanBytes;
};

// The softmax of a warp's rows as it takes tiles, in powers of 2.
template <int MT>
struct RowSoftmax {
  float largest[MT][2];  // of logits times log2(e)
  float sum[MT][2];      // of 2^(logit - largest), this lane's columns

  __device__ RowSoftmax() {
#pragma unroll
    for (int i = 0; i < 2 * MT; ++i) {
      largest[i / 2][i % 2] = -INFINITY;
      sum[i / 2][i % 2] = 0.0F;
    }
  }

  // Turns a tile's products into probabilities and rescales `out` to the new maximum.
  template <int NT, int DT>
  __device__ void take(float (&c)[MT][NT][4], float (&out)[MT][DT][4], float scale) {
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = c[m][0][2 * half];
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          most = fmaxf(most, fmaxf(c[m][n][2 * half], c[m][n][2 * half + 1]));
        }
        most = fmaxf(largest[m][half], quad_max(most) * scale);
        const float base = most == -INFINITY ? 0.0F : most;  // no key seen so far
        const float factor = exp2_fast(largest[m][half] - base);
        largest[m][half] = most;
        float total = 0.0F;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            c[m][n][e] = exp2_fast(fmaf(c[m][n][e], scale, -base));
            total += c[m][n][e];
          }
        }
        sum[m][half] = sum[m][half] * factor + total;
#pragma unroll
        for (int n = 0; n < DT; ++n) {
          out[m][n][2 * half] *= factor;
          out[m][n][2 * half + 1] *= factor;
        }
      }
    }
  }
};

template <int D>
__global__ void __launch_bounds__(ForwardShape<D>::kThreads)
    forward_kernel(const AttentionArgs<BFloat16> a, BFloat16* out, float* lse) {
  using Shape = ForwardShape<D>;
  constexpr int kMT = Shape::kMT;
  constexpr int kNT = Shape::kKeys / 8;
  unsigned char* memory = dynamic_shared();
  auto* q = reinterpret_cast<BFloat16*>(memory);
  const typename Shape::Block block(a, memory + Shape::kQueryBytes);
  const KeyTiles<Shape::kKeys> tiles(a, block.first_token(), block.last_token());
  const int warp_row = warp_id() * 16 * kMT;
  load_tiles<D, Shape::kRows, Shape::kThreads>([&](int row) { return block.row_offset(row); },
                                               TileCopy{q, a.q});
  block.load_keys(0, tiles.tile(0));

  RowSoftmax<kMT> softmax;
  float sum[kMT][D / 8][4] = {};
  const float scale = a.scale * kLog2OfE;
  for (int i = 0; i < tiles.count(); ++i) {
    wait_copies();
    __syncthreads();  // tile i has come, and tile i - 1 is done with
    if (i + 1 < tiles.count()) {
      block.load_keys(i + 1, tiles.tile(i + 1));
    }
    const auto tile = tiles.tile(i);
    float c[kMT][kNT][4] = {};
    multiply_rows<D>(c, SharedElements(q), warp_row, SharedElements(block.k_tile(i)));
    if (!tile.is_full) {
      block.mask(c, warp_row, tile, -INFINITY);
    }
    softmax.take(c, sum, scale);
    multiply_columns<D>(sum, c, SharedElements(block.v_tile(i)), 0);
  }

  float factor[kMT][2];
#pragma unroll
  for (int m = 0; m < kMT; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = block.first_row + warp_row + m * 16 + half * 8 + lane_id() / 4;
      float total = quad_sum(softmax.sum[m][half]);
      float largest = softmax.largest[m][half];
      factor[m][half] = 1.0F;
      if (row >= a.rows()) {
        continue;
      }
      if (a.sink != nullptr) {
        const int head = block.kv_head * a.group + row % a.group;
        const float sink = load_float(a.sink[head]) * kLog2OfE;
        const float most = fmaxf(largest, sink);
        factor[m][half] = exp2_fast(largest - most);
        total = total * factor[m][half] + exp2_fast(sink - most);
        largest = most;
      }
      factor[m][half] /= total;
      if (lane_id() % 4 == 0) {
        lse[a.query_row(block.kv_head, row)] = (largest + log2f(total)) * kLnOf2;
      }
    }
  }
  store_rows<D>(sum, factor, q, warp_row, 0, out, [&](int row) { return block.row_offset(row); });
}

template <int D>
void launch(CudaStream& stream, const AttentionArgs<BFloat16>& a, BFloat16* out, float* lse) {
  using Shape = ForwardShape<D>;
  const std::int64_t blocks = ceil_div(a.rows(), Shape::kRows) * a.kv_heads;
  launch_kernel(
      stream, grid_of(blocks), Shape::kThreads, Shape::kBytes, forward_kernel<D>, a, out, lse);
}

}  // namespace

void attend_tiles(CudaStream& stream, const AttentionArgs<BFloat16>& a, BFloat16* out, float* lse) {
  if (a.tokens == 0) {
    return;
  }
  if (a.dim == 64) {
    launch<64>(stream, a, out, lse);
  } else if (a.dim == 128) {
    launch<128>(stream, a, out, lse);
  } else {
    launch<256>(stream, a, out, lse);
  }
}

}  // namespace bifocal
