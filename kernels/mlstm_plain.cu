// The mLSTM's chunk sums and reads on CUDA cores: any width, any type; the float32 mode.
#include "kernels/mlstm_plain.cuh"

namespace bifocal {
namespace {

// A block for each tile of a chunk's sum_j w_j k_j [v_j, 1], w at the scale of the chunk's end.
template <class T>
__global__ void __launch_bounds__(kTileThreads) sums_kernel(MlstmArrays<T> a) {
  __shared__ float weight[kMlstmChunk];
  const MlstmPlace<T> p(a, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y));
  const MlstmStateTile place(static_cast<int>(blockIdx.z), a.shape.dim);
  if (threadIdx.x < kMlstmChunk) {
    weight[threadIdx.x] = p.decay(p.length - 1, static_cast<int>(threadIdx.x));
  }
  __syncthreads();
  PlainTile tile;
  tile.clear();
  tile.add_product(
      kMlstmChunk,
      [&](int row, int j) { return weight[j] * p.key(j, place.feature + row); },
      [&](int j, int column) { return p.value(j, place.column + column); });
  store_state_tile(a.shape, a.x + a.shape.state_at(p.chunk, p.state), place, tile);
}

// A block for each chunk of each query head.
template <class T>
__global__ void __launch_bounds__(kTileThreads) reads_kernel(MlstmArrays<T> a) {
  __shared__ MlstmWeights weights;
  const int head = static_cast<int>(blockIdx.y);
  const MlstmPlace<T> p(a, static_cast<int>(blockIdx.x), head / a.shape.readers);
  weigh_keys(p, head, weights);
  // Carries only fall within a document and stay 0 after the first start.
  const bool carries = weights.carry[0] != 0.0F;
  for (int begin = 0; begin < a.shape.dim; begin += kTile) {
    PlainTile tile;
    tile.clear();
    if (carries) {
      tile.add_product(
          a.shape.dim,
          [&](int t, int i) { return weights.carry[t] * p.at_head(a.q, t, head, i); },
          [&](int i, int column) { return p.state_element(a.x, i, begin + column); });
    }
    tile.add_product(
        kMlstmChunk,
        [&](int t, int j) { return weights.weight[t][j]; },
        [&](int j, int column) { return p.value(j, begin + column); });
    tile.each([&](int t, int column, float sum) {
      if (t < p.length && begin + column < a.shape.dim) {
        a.h_out[a.shape.head_row(p.begin + t, head) + begin + column] =
            store_as<T>(sum / weights.normaliser[t]);
      }
    });
  }
}

}  // namespace

template <class T>
void plain_mlstm_sums(CudaStream& stream, const MlstmArrays<T>& a) {
  const dim3 grid = mlstm_plain_grid(a.shape, a.shape.states, mlstm_state_tiles(a.shape.dim));
  sums_kernel<T><<<grid, kTileThreads, 0, stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
}

template <class T>
void plain_mlstm_reads(CudaStream& stream, const MlstmArrays<T>& a) {
  reads_kernel<T>
      <<<mlstm_plain_grid(a.shape, a.shape.heads), kTileThreads, 0, stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
}

template void plain_mlstm_sums(CudaStream&, const MlstmArrays<float>&);
template void plain_mlstm_sums(CudaStream&, const MlstmArrays<BFloat16>&);
template void plain_mlstm_reads(CudaStream&, const MlstmArrays<float>&);
template void plain_mlstm_reads(CudaStream&, const MlstmArrays<BFloat16>&);

}  // namespace bifocal
