// Softmax features on CUDA cores: any width, any type; the float32 mode.
#include <cmath>

#include "kernels/feature_map.cuh"
#include "kernels/plain_tile.cuh"
#include "kernels/warp.cuh"

namespace bifocal {
namespace {

constexpr int kRowsPerBlock = kBlockThreads / kWarp;

// z[t, head] = weight_head x_t: a block for each tile of 64 tokens and 64 features of a head.
template <class T>
__global__ void __launch_bounds__(kTileThreads) products_kernel(FeatureMapArrays<T> a, float* z) {
  const int head = static_cast<int>(blockIdx.y);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kTile;
  const int feature = static_cast<int>(blockIdx.z) * kTile;
  PlainTile tile;
  tile.clear();
  tile.add_product(
      a.dim,
      [&](int t, int i) { return a.input(first + t, a.x_head(head), i); },
      [&](int i, int column) { return a.weight_at(head, feature + column, i); });
  tile.each([&](int t, int column, float sum) {
    if (first + t < a.tokens && feature + column < a.dim) {
      z[a.row(first + t, head) + feature + column] = sum;
    }
  });
}

// A warp for each row.
template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    softmax_kernel(T* y, const float* z, std::int64_t rows, int dim) {
  const std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= rows) {
    return;  // whole warps
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const float* from = z + row * dim;
  float largest = -HUGE_VALF;
  for (int i = lane; i < dim; i += kWarp) {
    largest = fmaxf(largest, from[i]);
  }
  largest = warp_max(largest);
  float sum = 0.0F;
  for (int i = lane; i < dim; i += kWarp) {
    sum += expf(from[i] - largest);
  }
  const float factor = 1.0F / warp_sum(sum);
  for (int i = lane; i < dim; i += kWarp) {
    y[row * dim + i] = store_as<T>(expf(from[i] - largest) * factor);
  }
}

// d_z = y (d_y - <d_y, y>); a warp for each row.
template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    softmax_backward_kernel(float* d_z, const T* y, const T* d_y, std::int64_t rows, int dim) {
  const std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= rows) {
    return;  // whole warps
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float mean = 0.0F;
  for (int i = lane; i < dim; i += kWarp) {
    mean += load_float(y[row * dim + i]) * load_float(d_y[row * dim + i]);
  }
  mean = warp_sum(mean);
  for (int i = lane; i < dim; i += kWarp) {
    d_z[row * dim + i] = load_float(y[row * dim + i]) * (load_float(d_y[row * dim + i]) - mean);
  }
}

// d_x += sum over the heads of an input of d_z weight: a block for each tile.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    input_gradients_kernel(FeatureMapArrays<T> a, const float* d_z) {
  const int x_head = static_cast<int>(blockIdx.y);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kTile;
  const int begin = static_cast<int>(blockIdx.z) * kTile;
  PlainTile tile;
  tile.clear();
  for (int head = x_head * a.repeats(); head < (x_head + 1) * a.repeats(); ++head) {
    tile.add_product(
        a.dim,
        [&](int t, int feature) {
          return first + t < a.tokens ? d_z[a.row(first + t, head) + feature] : 0.0F;
        },
        [&](int feature, int column) { return a.weight_at(head, feature, begin + column); });
  }
  tile.each([&](int t, int column, float sum) {
    if (first + t < a.tokens && begin + column < a.dim) {
      T& target = a.d_x[a.input_row(first + t, x_head) + begin + column];
      target = store_as<T>(load_float(target) + sum);
    }
  });
}

// parts[span, head] = sum over the span's tokens of d_z x^T: a block for each tile of a span.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    weight_gradients_kernel(FeatureMapArrays<T> a, const float* d_z, float* parts) {
  const int head = static_cast<int>(blockIdx.y);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * a.span;
  const int tiles = static_cast<int>(gridDim.z) / static_cast<int>((a.dim + kTile - 1) / kTile);
  const int feature = static_cast<int>(blockIdx.z) / tiles * kTile;
  const int begin = static_cast<int>(blockIdx.z) % tiles * kTile;
  PlainTile tile;
  tile.clear();
  tile.add_product(
      a.span,
      [&](int row, int t) {
        return first + t < a.tokens && feature + row < a.dim
                   ? d_z[a.row(first + t, head) + feature + row]
                   : 0.0F;
      },
      [&](int t, int column) { return a.input(first + t, a.x_head(head), begin + column); });
  const std::int64_t square = static_cast<std::int64_t>(a.dim) * a.dim;
  float* own = parts + (static_cast<std::int64_t>(blockIdx.x) * a.heads + head) * square;
  tile.each([&](int row, int column, float sum) {
    if (feature + row < a.dim && begin + column < a.dim) {
      own[static_cast<std::int64_t>(feature + row) * a.dim + begin + column] = sum;
    }
  });
}

dim3 tile_grid(std::int64_t blocks, int heads, std::int64_t tiles) {
  return dim3(grid_of(blocks).x, static_cast<unsigned>(heads), static_cast<unsigned>(tiles));
}

}  // namespace

template <class T>
void plain_feature_map(CudaStream& stream, DeviceScratch& scratch, const FeatureMapArrays<T>& a) {
  const std::int64_t rows = a.tokens * a.heads;
  auto* z = scratch.take<float>(rows * a.dim);
  const dim3 grid = tile_grid(ceil_div(a.tokens, kTile), a.heads, ceil_div(a.dim, kTile));
  products_kernel<T><<<grid, kTileThreads, 0, stream.handle()>>>(a, z);
  BIFOCAL_CUDA(cudaGetLastError());
  softmax_kernel<T><<<grid_of(ceil_div(rows, kRowsPerBlock)), kBlockThreads, 0, stream.handle()>>>(
      a.y_out, z, rows, a.dim);
  BIFOCAL_CUDA(cudaGetLastError());
}

template <class T>
void plain_feature_map_backward(CudaStream& stream,
                                DeviceScratch& scratch,
                                const FeatureMapArrays<T>& a,
                                float* parts) {
  const std::int64_t rows = a.tokens * a.heads;
  const std::int64_t tiles = ceil_div(a.dim, kTile);
  auto* d_z = scratch.take<float>(rows * a.dim);
  softmax_backward_kernel<T>
      <<<grid_of(ceil_div(rows, kRowsPerBlock)), kBlockThreads, 0, stream.handle()>>>(
          d_z, a.y, a.d_y, rows, a.dim);
  BIFOCAL_CUDA(cudaGetLastError());
  const dim3 inputs = tile_grid(ceil_div(a.tokens, kTile), a.x_heads, tiles);
  input_gradients_kernel<T><<<inputs, kTileThreads, 0, stream.handle()>>>(a, d_z);
  BIFOCAL_CUDA(cudaGetLastError());
  const dim3 weights = tile_grid(ceil_div(a.tokens, a.span), a.heads, tiles * tiles);
  weight_gradients_kernel<T><<<weights, kTileThreads, 0, stream.handle()>>>(a, d_z, parts);
  BIFOCAL_CUDA(cudaGetLastError());
}

template void plain_feature_map(CudaStream&, DeviceScratch&, const FeatureMapArrays<float>&);
template void plain_feature_map(CudaStream&, DeviceScratch&, const FeatureMapArrays<BFloat16>&);
template void plain_feature_map_backward(CudaStream&,
                                         DeviceScratch&,
                                         const FeatureMapArrays<float>&,
                                         float*);
template void plain_feature_map_backward(CudaStream&,
                                         DeviceScratch&,
                                         const FeatureMapArrays<BFloat16>&,
                                         float*);

}  // namespace bifocal
