// What the mLSTM's tensor core kernels share: a chunk's scalars in shared memory and its weights.
#pragma once

#include "kernels/mlstm_problem.cuh"
#include "kernels/mma_tile.cuh"

namespace bifocal {

inline constexpr int kMlstmStrips = kMlstmChunk / 16;  // warps that share a chunk's rows

// Value or feature columns of one block: what the registers of its warps hold.
template <int D>
inline constexpr int kMlstmColumns = D < 128 ? D : 128;

// Exponents as sums of two floats: (row + column) is exact or rounds by less than a roundoff of
// itself, so the parts below add what float32 sums would have lost.
struct MlstmChunkScalars {
  float row_high[kMlstmChunk], row_low[kMlstmChunk];
  float column_high[kMlstmChunk], column_low[kMlstmChunk];
  float carry[kMlstmChunk];  // u_t
  float write[kMlstmChunk];  // w_j, at the scale of the chunk's end
  int first[kMlstmChunk];    // first token seen, in the chunk's numbering; 64 past the end

  // By threads [0, 64). Ends without a barrier.
  __device__ void load(const MlstmShape& shape, const MlstmScalars& from, int chunk, int state) {
    const int t = static_cast<int>(threadIdx.x);
    if (t >= kMlstmChunk) {
      return;
    }
    const int begin = chunk * kMlstmChunk;
    const int length = shape.length(chunk);
    const std::int64_t at = static_cast<std::int64_t>(state) * shape.tokens + begin;
    const bool present = t < length;
    const double row = present ? from.row[at + t] : 0.0;
    const double column = present ? from.column[at + t] : 0.0;
    row_high[t] = static_cast<float>(row);
    row_low[t] = rest_of(row, row_high[t]);
    column_high[t] = static_cast<float>(column);
    column_low[t] = rest_of(column, column_high[t]);
    const int seen = present ? from.first[begin + t] : 0;
    first[t] = present ? max(seen - begin, 0) : kMlstmChunk;
    const double before = from.before[static_cast<std::int64_t>(state) * shape.chunks + chunk];
    carry[t] = present && seen < 0 ? mlstm_weight(row, before) : 0.0F;
    const bool written = present && begin + t >= from.first[begin + length - 1];
    write[t] = written ? mlstm_weight(from.row[at + length - 1], column) : 0.0F;
  }

  // D_tj.
  __device__ float weight(int t, int j) const {
    const float x = (row_high[t] + column_high[j]) + (row_low[t] + column_low[j]);
    return j <= t && j >= first[t] ? fast_exp2(x) : 0.0F;
  }

  // An infinite gate leaves no rest.
  __device__ static float rest_of(double x, float high) {
    return isinf(high) ? 0.0F : static_cast<float>(x - static_cast<double>(high));
  }
};

// n as two bfloat16 columns beside C, so that it enters products with 16 bits.
template <int D>
struct MlstmNormaliserColumns {
  BFloat16 high[D], low[D];

  __device__ void load(const float* n, int thread, int threads) {
    for (int i = thread; i < D; i += threads) {
      high[i] = store_as<BFloat16>(n[i]);
      low[i] = store_as<BFloat16>(n[i] - load_float(high[i]));
    }
  }

  // The right operand of rows k, k + 16: column 0 high, column 1 low, six of zeros.
  __device__ void operand(int k, std::uint32_t& b0, std::uint32_t& b1) const {
    const int lane = lane_of_warp();
    const int column = lane / 4;
    const BFloat16* from = (column == 0 ? high : low) + k + lane % 4 * 2;
    b0 = column < 2 ? *reinterpret_cast<const std::uint32_t*>(from) : 0U;
    b1 = column < 2 ? *reinterpret_cast<const std::uint32_t*>(from + 8) : 0U;
  }
};

// The two sums of rows g and g + 8 in columns 0 and 1, given to all lanes of the row.
__device__ inline void spread_columns(const float (&sum)[4], float& low_row, float& high_row) {
  const int lane = lane_of_warp();
  low_row = __shfl_sync(0xffffffffU, sum[0] + sum[1], lane / 4 * 4);
  high_row = __shfl_sync(0xffffffffU, sum[2] + sum[3], lane / 4 * 4);
}

}  // namespace bifocal
