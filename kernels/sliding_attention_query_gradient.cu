// Sliding attention on tensor cores, gradient of the queries: a block holds 128 packed query rows
// (64 at head width 256) and goes through their keys as the forward pass does.
#include "kernels/attention_tile.cuh"
#include "kernels/launch.cuh"

namespace bifocal {
namespace {

template <int D>
struct QueryGradientShape {
  static constexpr int kWarps = D == 256 ? 4 : 8;  // of 16 rows each
  static constexpr int kKeys = D == 64 ? 64 : 32;
  static constexpr bool kKeepsRows = D <= 128;  // of q and d_out in registers
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kWarps;
  static constexpr int kQueryBytes = 2 * kRows * D * static_cast<int>(sizeof(BFloat16));
  using Block = QueryBlock<D, kRows, kKeys, kThreads>;
  static constexpr int kBytes = kQueryBytes + Block::kKeyBytes + Block::kSpanBytes;
};

template <int D>
__global__ void __launch_bounds__(QueryGradientShape<D>::kThreads)
    query_gradient_kernel(const AttentionArgs<BFloat16> a, const AttentionGradients<BFloat16> g) {
  using Shape = QueryGradientShape<D>;
  constexpr int kNT = Shape::kKeys / 8;
  unsigned char* memory = dynamic_shared();
  auto* q = reinterpret_cast<BFloat16*>(memory);
  BFloat16* d_out = q + Shape::kRows * D;
  const typename Shape::Block block(a, memory + Shape::kQueryBytes);
  const KeyTiles<Shape::kKeys> tiles(a, block.first_token(), block.last_token());
  const int warp_row = warp_id() * 16;
  load_tiles<D, Shape::kRows, Shape::kThreads>(
      [&](int row) { return block.row_offset(row); }, TileCopy{q, a.q}, TileCopy{d_out, g.d_out});
  block.load_keys(0, tiles.tile(0));

  float lse[2];  // times log2(e)
  float delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = block.first_row + warp_row + half * 8 + lane_id() / 4;
    const bool is_row = row < a.rows();
    const std::int64_t at = is_row ? a.query_row(block.kv_head, row) : 0;
    lse[half] = is_row ? g.lse[at] * kLog2OfE : 0.0F;
    delta[half] = is_row ? g.delta[at] : 0.0F;
  }

  [[maybe_unused]] LeftRows<D> left_q;
  [[maybe_unused]] LeftRows<D> left_d_out;
  if constexpr (Shape::kKeepsRows) {
    wait_copies();
    __syncthreads();
    left_q.load(SharedElements(q), warp_row);
    left_d_out.load(SharedElements(d_out), warp_row);
  }

  float sum[1][D / 8][4] = {};
  const float scale = a.scale * kLog2OfE;
  for (int i = 0; i < tiles.count(); ++i) {
    wait_copies();
    __syncthreads();  // tile i has come, and tile i - 1 is done with
    if (i + 1 < tiles.count()) {
      block.load_keys(i + 1, tiles.tile(i + 1));
    }
    const auto tile = tiles.tile(i);
    float p[1][kNT][4] = {};
    float dz[1][kNT][4] = {};
    if constexpr (Shape::kKeepsRows) {
      multiply_rows<D>(p, left_q, SharedElements(block.k_tile(i)));
      multiply_rows<D>(dz, left_d_out, SharedElements(block.v_tile(i)));
    } else {
      multiply_rows<D>(p, SharedElements(q), warp_row, SharedElements(block.k_tile(i)));
      multiply_rows<D>(dz, SharedElements(d_out), warp_row, SharedElements(block.v_tile(i)));
    }
#pragma unroll
    for (int n = 0; n < kNT; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float probability = exp2_fast(fmaf(p[0][n][e], scale, -lse[e / 2]));
        dz[0][n][e] = probability * (dz[0][n][e] - delta[e / 2]);
      }
    }
    if (!tile.is_full) {
      block.mask(dz, warp_row, tile, 0.0F);
    }
    multiply_columns<D>(sum, dz, SharedElements(block.k_tile(i)), 0);
  }
  const float factor[1][2] = {{a.scale, a.scale}};
  store_rows<D>(sum, factor, q, warp_row, 0, g.d_q, [&](int row) { return block.row_offset(row); });
}

template <int D>
void launch(CudaStream& stream,
            const AttentionArgs<BFloat16>& a,
            const AttentionGradients<BFloat16>& g) {
  using Shape = QueryGradientShape<D>;
  const std::int64_t blocks = ceil_div(a.rows(), Shape::kRows) * a.kv_heads;
  launch_kernel(
      stream, grid_of(blocks), Shape::kThreads, Shape::kBytes, query_gradient_kernel<D>, a, g);
}

}  // namespace

void differentiate_query_tiles(CudaStream& stream,
                               const AttentionArgs<BFloat16>& a,
                               const AttentionGradients<BFloat16>& g) {
  if (a.tokens == 0) {
    return;
  }
  if (a.dim == 64) {
    launch<64>(stream, a, g);
  } else if (a.dim == 128) {
    launch<128>(stream, a, g);
  } else {
    launch<256>(stream, a, g);
  }
}

}  // namespace bifocal
