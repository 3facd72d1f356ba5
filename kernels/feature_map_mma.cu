// Softmax features on tensor cores. A warp holds 16 rows whole, so that their softmax stays in its
// registers; a block keeps a head's weight in shared memory over several tiles of tokens.
#include "kernels/feature_map.cuh"
#include "kernels/mma_tile.cuh"
#include "kernels/warp.cuh"

namespace bifocal {
namespace {

constexpr int kTokens = 64;  // of a tile: four warps
constexpr int kThreads = 128;
constexpr int kTilesPerBlock = 4;

template <int D>
int forward_bytes() {
  return SharedTile<D>::bytes(D + kTokens);
}

template <int D>
int backward_bytes() {
  return SharedTile<D>::bytes(D + 2 * kTokens);
}

// Softmax of rows g and g + 8 over the four lanes that hold each.
template <int N>
__device__ void softmax_rows(float (&z)[N][4]) {
#pragma unroll
  for (int half = 0; half < 4; half += 2) {
    float most = z[0][half];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      most = fmaxf(most, fmaxf(z[n][half], z[n][half + 1]));
    }
    most = quad_max(most);
    float sum = 0.0F;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = half; i < half + 2; ++i) {
        z[n][i] = exp2_fast((z[n][i] - most) * 1.44269504F);
        sum += z[n][i];
      }
    }
    const float factor = 1.0F / quad_sum(sum);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      z[n][half] *= factor;
      z[n][half + 1] *= factor;
    }
  }
}

// A block for four tiles of one head.
template <int D>
__global__ void __launch_bounds__(kThreads) forward_kernel(FeatureMapArrays<BFloat16> a) {
  extern __shared__ uint4 memory[];
  const SharedTile<D> weight{reinterpret_cast<BFloat16*>(memory)};
  const SharedTile<D> rows{weight.at(D, 0)};
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / 32 * 16;
  const int head = static_cast<int>(blockIdx.y);
  weight.load(a.weight + static_cast<std::int64_t>(head) * D * D, D, D, D, thread, kThreads);
  for (int tile = 0; tile < kTilesPerBlock; ++tile) {
    const std::int64_t first =
        (static_cast<std::int64_t>(blockIdx.x) * kTilesPerBlock + tile) * kTokens;
    if (first >= a.tokens) {
      break;
    }
    const int valid = a.tokens - first < kTokens ? static_cast<int>(a.tokens - first) : kTokens;
    rows.load(a.x + a.input_row(first, a.x_head(head)),
              static_cast<std::int64_t>(a.x_heads) * D,
              kTokens,
              valid,
              thread,
              kThreads);
    wait_copies();
    __syncthreads();
    float z[D / 8][4];
    clear(z);
    add_product_transposed(z, rows, row, weight);
    softmax_rows(z);
    store_rows(
        z, rows, row, a.y_out + a.row(first, head), static_cast<std::int64_t>(a.heads) * D, valid);
    __syncthreads();
  }
}

// d_z = y (d_y - <d_y, y>) over y, for a warp's 16 rows; two lanes a row.
template <int D>
__device__ void differentiate_rows(const SharedTile<D>& y, const SharedTile<D>& d_y, int row) {
  const int lane = lane_of_warp();
  const int line = row + lane / 2;
  float mean = 0.0F;
#pragma unroll 2
  for (int column = lane % 2 * 8; column < D; column += 16) {
    const auto a = load_vector<8>(y.at(line, column), 0);
    const auto b = load_vector<8>(d_y.at(line, column), 0);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      mean += load_float(a.element[i]) * load_float(b.element[i]);
    }
  }
  mean = warp_sum<2>(mean);
#pragma unroll 2
  for (int column = lane % 2 * 8; column < D; column += 16) {
    auto a = load_vector<8>(y.at(line, column), 0);
    const auto b = load_vector<8>(d_y.at(line, column), 0);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      a.element[i] =
          store_as<BFloat16>(load_float(a.element[i]) * (load_float(b.element[i]) - mean));
    }
    store_vector<8>(y.at(line, column), 0, a);
  }
}

// Adds a warp's sums to 16 rows of bfloat16 in global memory, rounded once, through a tile that it
// alone uses.
template <int N, int D>
__device__ void add_rows(float (&sums)[N][4],
                         const SharedTile<D>& tile,
                         int row,
                         BFloat16* first,
                         std::int64_t stride,
                         int valid) {
  const int lane = lane_of_warp();
  __syncwarp();
  for (int item = lane; item < 16 * N; item += 32) {
    const int line = row + item / N;
    const int column = item % N * 8;
    if (line < valid) {
      store_vector<8>(tile.at(line, column), 0, load_vector<8>(first + line * stride + column, 0));
    }
  }
  __syncwarp();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int column = n * 8 + lane % 4 * 2;
    const auto low = *reinterpret_cast<const std::uint32_t*>(tile.at(row + lane / 4, column));
    const auto high = *reinterpret_cast<const std::uint32_t*>(tile.at(row + lane / 4 + 8, column));
    sums[n][0] += low_of(low);
    sums[n][1] += high_of(low);
    sums[n][2] += low_of(high);
    sums[n][3] += high_of(high);
  }
  store_rows(sums, tile, row, first, stride, valid);
}

// A block for four tiles of one head of x: d_z of all heads that read it, and d_x.
template <int D>
__global__ void __launch_bounds__(kThreads)
    input_gradients_kernel(FeatureMapArrays<BFloat16> a, BFloat16* d_z) {
  extern __shared__ uint4 memory[];
  const SharedTile<D> weight{reinterpret_cast<BFloat16*>(memory)};
  const SharedTile<D> y{weight.at(D, 0)};
  const SharedTile<D> d_y{y.at(kTokens, 0)};
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = lane_of_warp();
  const int row = thread / 32 * 16;
  const int x_head = static_cast<int>(blockIdx.y);
  const int repeats = a.repeats();
  const std::int64_t stride = static_cast<std::int64_t>(a.heads) * D;
  for (int tile = 0; tile < kTilesPerBlock; ++tile) {
    const std::int64_t first =
        (static_cast<std::int64_t>(blockIdx.x) * kTilesPerBlock + tile) * kTokens;
    if (first >= a.tokens) {
      break;
    }
    const int valid = a.tokens - first < kTokens ? static_cast<int>(a.tokens - first) : kTokens;
    float sums[D / 8][4];
    clear(sums);
    for (int head = x_head * repeats; head < (x_head + 1) * repeats; ++head) {
      const std::int64_t at = a.row(first, head);
      if (tile == 0 || repeats > 1) {
        weight.load(a.weight + static_cast<std::int64_t>(head) * D * D, D, D, D, thread, kThreads);
      }
      y.load(a.y + at, stride, kTokens, valid, thread, kThreads);
      d_y.load(a.d_y + at, stride, kTokens, valid, thread, kThreads);
      wait_copies();
      __syncthreads();
      differentiate_rows(y, d_y, row);
      __syncwarp();
      for (int item = lane; item < 16 * (D / 8); item += 32) {
        const int line = row + item / (D / 8);
        const int column = item % (D / 8) * 8;
        if (line < valid) {
          store_vector<8>(
              d_z + at + line * stride + column, 0, load_vector<8>(y.at(line, column), 0));
        }
      }
      add_product(sums, y, row, weight);
      __syncthreads();
    }
    add_rows(sums,
             y,
             row,
             a.d_x + a.input_row(first, x_head),
             static_cast<std::int64_t>(a.x_heads) * D,
             valid);
    __syncthreads();
  }
}

template <int D>
inline constexpr int kWeightColumns = D < 128 ? D : 128;

// A block for each 128 x 128 (or D x D) of a head's sum of d_z x^T over a span of tokens.
template <int D>
__global__ void __launch_bounds__(kWeightColumns<D> * 2)
    weight_gradients_kernel(FeatureMapArrays<BFloat16> a, const BFloat16* d_z, float* parts) {
  constexpr int kColumns = kWeightColumns<D>;
  constexpr int kBlock = kColumns * 2;
  extern __shared__ uint4 memory[];
  const SharedTile<kColumns> left{reinterpret_cast<BFloat16*>(memory)};
  const SharedTile<kColumns> right{left.at(kTokens, 0)};
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = lane_of_warp();
  const int warp_feature = thread / 32 * 16;
  const int head = static_cast<int>(blockIdx.y);
  const int feature = static_cast<int>(blockIdx.z) / (D / kColumns) * kColumns;
  const int column = static_cast<int>(blockIdx.z) % (D / kColumns) * kColumns;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * a.span;
  const std::int64_t end = begin + a.span < a.tokens ? begin + a.span : a.tokens;
  float sums[kColumns / 8][4];
  clear(sums);
  for (std::int64_t first = begin; first < end; first += kTokens) {
    const int valid = end - first < kTokens ? static_cast<int>(end - first) : kTokens;
    left.load(d_z + a.row(first, head) + feature,
              static_cast<std::int64_t>(a.heads) * D,
              kTokens,
              valid,
              thread,
              kBlock);
    right.load(a.x + a.input_row(first, a.x_head(head)) + column,
               static_cast<std::int64_t>(a.x_heads) * D,
               kTokens,
               valid,
               thread,
               kBlock);
    wait_copies();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTokens; k += 16) {
      std::uint32_t operand[4];
      load_matrices_transposed(operand, left.by_columns(k, warp_feature));
      add_weighted_rows(sums, operand, right, k, 0);
    }
    __syncthreads();
  }
  float* own = parts + (static_cast<std::int64_t>(blockIdx.x) * a.heads + head) * D * D +
               (feature + warp_feature + lane / 4) * D + column + lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
    store_vector<2>(own + n * 8, 0, Vector<float, 2>{{sums[n][0], sums[n][1]}});
    store_vector<2>(own + 8 * D + n * 8, 0, Vector<float, 2>{{sums[n][2], sums[n][3]}});
  }
}

dim3 tiles_grid(std::int64_t tokens, int heads) {
  return dim3(grid_of(ceil_div(tokens, kTokens * kTilesPerBlock)).x, static_cast<unsigned>(heads));
}

template <int D>
void forward(CudaStream& stream, const FeatureMapArrays<BFloat16>& a) {
  allow_shared(forward_kernel<D>, forward_bytes<D>());
  forward_kernel<D>
      <<<tiles_grid(a.tokens, a.heads), kThreads, forward_bytes<D>(), stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
}

template <int D>
void backward(CudaStream& stream,
              DeviceScratch& scratch,
              const FeatureMapArrays<BFloat16>& a,
              float* parts) {
  constexpr int kColumns = kWeightColumns<D>;
  constexpr unsigned kTiles = (D / kColumns) * (D / kColumns);
  auto* d_z = scratch.take<BFloat16>(a.tokens * a.heads * D);
  allow_shared(input_gradients_kernel<D>, backward_bytes<D>());
  input_gradients_kernel<D>
      <<<tiles_grid(a.tokens, a.x_heads), kThreads, backward_bytes<D>(), stream.handle()>>>(a, d_z);
  BIFOCAL_CUDA(cudaGetLastError());
  const int bytes = SharedTile<kColumns>::bytes(2 * kTokens);
  const dim3 grid(grid_of(ceil_div(a.tokens, a.span)).x, static_cast<unsigned>(a.heads), kTiles);
  weight_gradients_kernel<D><<<grid, 2 * kColumns, bytes, stream.handle()>>>(a, d_z, parts);
  BIFOCAL_CUDA(cudaGetLastError());
}

}  // namespace

bool has_mma_feature_map(const FeatureMapArrays<BFloat16>& a) {
  const bool width = a.dim == 64 || a.dim == 128 || a.dim == 256;
  const int bytes = a.dim == 256 ? backward_bytes<256>() : backward_bytes<128>();
  return width && is_aligned(16, a.x, a.weight, a.y, a.y_out, a.d_y, a.d_x) &&
         bytes <= most_shared_bytes();
}

void mma_feature_map(CudaStream& stream, const FeatureMapArrays<BFloat16>& a) {
  a.dim == 64    ? forward<64>(stream, a)
  : a.dim == 128 ? forward<128>(stream, a)
                 : forward<256>(stream, a);
}

void mma_feature_map_backward(CudaStream& stream,
                              DeviceScratch& scratch,
                              const FeatureMapArrays<BFloat16>& a,
                              float* parts) {
  a.dim == 64    ? backward<64>(stream, scratch, a, parts)
  : a.dim == 128 ? backward<128>(stream, scratch, a, parts)
                 : backward<256>(stream, scratch, a, parts);
}

}  // namespace bifocal
