// The mLSTM's gradients on CUDA cores: any width, any type; the float32 mode.
#include "kernels/mlstm_plain.cuh"

namespace bifocal {
namespace {

// A block for each chunk of each query head: inverse and delta of its reads.
template <class T>
__global__ void __launch_bounds__(kTileThreads) read_scalars_kernel(MlstmArrays<T> a) {
  __shared__ MlstmWeights weights;
  const int head = static_cast<int>(blockIdx.y);
  const MlstmPlace<T> p(a, static_cast<int>(blockIdx.x), head / a.shape.readers);
  weigh_keys(p, head, weights);
  const int t = static_cast<int>(threadIdx.x) / 4;
  float product = 0.0F;
  for (int i = static_cast<int>(threadIdx.x) % 4; i < a.shape.dim; i += 4) {
    product += p.at_head(a.h, t, head, i) * p.at_head(a.d_h, t, head, i);
  }
  product = quad_sum(product);
  if (threadIdx.x % 4 == 0 && t < p.length) {
    const float inverse = 1.0F / weights.normaliser[t];
    a.inverse[p.head_scalar(t, head)] = inverse;
    a.delta[p.head_scalar(t, head)] = -inverse * product;
  }
}

// A block for each tile of a chunk's sum over reads of u_t q_t [e_t, r_t].
template <class T>
__global__ void __launch_bounds__(kTileThreads) read_sums_kernel(MlstmArrays<T> a) {
  __shared__ float carry[kMlstmChunk];
  const MlstmPlace<T> p(a, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y));
  const MlstmStateTile place(static_cast<int>(blockIdx.z), a.shape.dim);
  if (threadIdx.x < kMlstmChunk) {
    carry[threadIdx.x] = p.carry(static_cast<int>(threadIdx.x));
  }
  __syncthreads();
  PlainTile tile;
  tile.clear();
  if (carry[0] != 0.0F) {
    for (int reader = 0; reader < a.shape.readers; ++reader) {
      const int head = p.state * a.shape.readers + reader;
      tile.add_product(
          kMlstmChunk,
          [&](int row, int t) { return carry[t] * p.at_head(a.q, t, head, place.feature + row); },
          [&](int t, int column) { return p.read_gradient(t, head, place.column + column); });
    }
  }
  store_state_tile(a.shape, a.d_x + a.shape.state_at(p.chunk, p.state), place, tile);
}

// Matrices [heads, chunks, 64, 64]: the weights and the gradients of q k^T.
struct Matrices {
  float *weights, *d_products;
};

__device__ inline std::int64_t matrix_at(const MlstmShape& shape, int chunk, int head) {
  return (static_cast<std::int64_t>(head) * shape.chunks + chunk) * kMlstmChunk * kMlstmChunk;
}

// From terms[t][j] = w_tj s_tj, which is overwritten: sums over what decays through each token and
// over what reads each token.
template <class T>
__device__ void differentiate_logs(const MlstmPlace<T>& p,
                                   int head,
                                   float (*terms)[kMlstmChunk + 1]) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < kMlstmChunk) {
    for (int t = kMlstmChunk - 2; t >= i; --t) {
      terms[t][i] += terms[t + 1][i];
    }
  }
  __syncthreads();
  if (i < p.length) {
    float through = 0.0F;
    for (int j = 0; j < i; ++j) {
      through += terms[i][j];
    }
    p.a.logs.through[p.head_scalar(i, head)] = through;
    p.a.logs.written[p.head_scalar(i, head)] = terms[i][i];
  }
}

// d_q = d_products k + u (e C^T + r n); read_t = q . the second part.
template <class T>
__device__ void differentiate_queries(const MlstmPlace<T>& p,
                                      int head,
                                      const float (*d_products)[kMlstmChunk + 1],
                                      const float* carry) {
  const MlstmArrays<T>& a = p.a;
  float read[4] = {};
  for (int begin = 0; begin < a.shape.dim; begin += kTile) {
    PlainTile tile;
    tile.clear();
    if (carry[0] != 0.0F) {
      tile.add_product(
          a.shape.dim + 1,
          [&](int t, int i) { return carry[t] * p.read_gradient(t, head, i); },
          [&](int i, int column) { return p.state_element(a.x, begin + column, i); });
      tile.each([&](int t, int column, float sum) {
        read[t - PlainTile::row()] += sum * p.at_head(a.q, t, head, begin + column);
      });
    }
    tile.add_product(
        kMlstmChunk,
        [&](int t, int j) { return d_products[t][j]; },
        [&](int j, int column) { return p.key(j, begin + column); });
    tile.each([&](int t, int column, float sum) {
      if (t < p.length && begin + column < a.shape.dim) {
        a.d_q[a.shape.head_row(p.begin + t, head) + begin + column] = store_as<T>(sum);
      }
    });
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float sum = warp_sum<16>(read[r]);
    const int t = PlainTile::row() + r;
    if (PlainTile::column() == 0 && t < p.length) {
      a.logs.read[p.head_scalar(t, head)] = sum;
    }
  }
}

// A block for each chunk of each query head.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    differentiate_reads_kernel(MlstmArrays<T> a, Matrices matrices) {
  __shared__ float terms[kMlstmChunk][kMlstmChunk + 1];
  __shared__ float d_products[kMlstmChunk][kMlstmChunk + 1];
  __shared__ float carry[kMlstmChunk];
  const int head = static_cast<int>(blockIdx.y);
  const MlstmPlace<T> p(a, static_cast<int>(blockIdx.x), head / a.shape.readers);
  const std::int64_t matrix = matrix_at(a.shape, p.chunk, head);
  if (threadIdx.x < kMlstmChunk) {
    carry[threadIdx.x] = p.carry(static_cast<int>(threadIdx.x));
  }
  PlainTile tile;
  tile.clear();
  tile.add_product(
      a.shape.dim,
      [&](int t, int i) { return p.at_head(a.q, t, head, i); },
      [&](int i, int j) { return p.key(j, i); });
  tile.each([&](int t, int j, float sum) { terms[t][j] = p.decay(t, j) * sum; });
  tile.clear();
  tile.add_product(
      a.shape.dim + 1,
      [&](int t, int i) { return p.read_gradient(t, head, i); },
      [&](int i, int j) { return p.value(j, i); });
  tile.each([&](int t, int j, float sum) {
    const float weight = terms[t][j];  // this thread's own
    const float d_product = p.decay(t, j) * sum;
    matrices.weights[matrix + t * kMlstmChunk + j] = weight;
    matrices.d_products[matrix + t * kMlstmChunk + j] = d_product;
    terms[t][j] = weight * sum;
    d_products[t][j] = d_product;
  });
  __syncthreads();
  differentiate_logs(p, head, terms);
  differentiate_queries(p, head, d_products, carry);
}

// u_last <X, dX>, the sum over a block in a fixed order.
template <class T>
__device__ float passed_whole(const MlstmPlace<T>& p, float pass) {
  __shared__ float partial[kTileThreads];
  float sum = 0.0F;
  if (pass != 0.0F) {
    const std::int64_t at = p.a.shape.state_at(p.chunk, p.state);
    for (std::int64_t i = threadIdx.x; i < p.a.shape.state_size(); i += kTileThreads) {
      sum += p.a.x[at + i] * p.a.d_x[at + i];
    }
  }
  partial[threadIdx.x] = sum;
  for (unsigned half = kTileThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      partial[threadIdx.x] += partial[threadIdx.x + half];
    }
  }
  __syncthreads();
  return pass * partial[0];
}

// A block for each chunk of each state: d_k = d_products^T q + w (dC v + dn), left and passed.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    differentiate_keys_kernel(MlstmArrays<T> a, Matrices matrices) {
  __shared__ float weight[kMlstmChunk];
  const MlstmPlace<T> p(a, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y));
  if (threadIdx.x < kMlstmChunk) {
    weight[threadIdx.x] = p.decay(p.length - 1, static_cast<int>(threadIdx.x));
  }
  const std::int64_t pass_at = static_cast<std::int64_t>(p.state) * a.shape.chunks + p.chunk;
  const float passed = passed_whole(p, a.scalars.pass[pass_at]);
  if (threadIdx.x == 0) {
    a.logs.passed[pass_at] = passed;
  }
  float left[4] = {};
  for (int begin = 0; begin < a.shape.dim; begin += kTile) {
    PlainTile tile;
    tile.clear();
    tile.add_product(
        a.shape.dim + 1,
        [&](int j, int i) { return weight[j] * p.value(j, i); },
        [&](int i, int column) { return p.state_element(a.d_x, begin + column, i); });
    tile.each([&](int j, int column, float sum) {
      left[j - PlainTile::row()] += sum * p.key(j, begin + column);
    });
    for (int reader = 0; reader < a.shape.readers; ++reader) {
      const int head = p.state * a.shape.readers + reader;
      const float* d_products = matrices.d_products + matrix_at(a.shape, p.chunk, head);
      tile.add_product(
          kMlstmChunk,
          [&](int j, int t) { return d_products[t * kMlstmChunk + j]; },
          [&](int t, int column) { return p.at_head(a.q, t, head, begin + column); });
    }
    tile.each([&](int j, int column, float sum) {
      if (j < p.length && begin + column < a.shape.dim) {
        a.d_k[a.shape.key_row(p.begin + j, p.state) + begin + column] = store_as<T>(sum);
      }
    });
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float sum = warp_sum<16>(left[r]);
    const int j = PlainTile::row() + r;
    if (PlainTile::column() == 0 && j < p.length) {
      a.logs.left[static_cast<std::int64_t>(p.state) * a.shape.tokens + p.begin + j] = sum;
    }
  }
}

// A block for each chunk of each value head: d_v = sum over its states of weights^T e + w dC^T k.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    differentiate_values_kernel(MlstmArrays<T> a, Matrices matrices) {
  __shared__ float weight[kMlstmChunk];
  const int v_head = static_cast<int>(blockIdx.y);
  for (int begin = 0; begin < a.shape.dim; begin += kTile) {
    PlainTile tile;
    tile.clear();
    for (int holder = 0; holder < a.shape.holders; ++holder) {
      const MlstmPlace<T> p(a, static_cast<int>(blockIdx.x), v_head * a.shape.holders + holder);
      __syncthreads();
      if (threadIdx.x < kMlstmChunk) {
        weight[threadIdx.x] = p.decay(p.length - 1, static_cast<int>(threadIdx.x));
      }
      __syncthreads();
      tile.add_product(
          a.shape.dim,
          [&](int j, int feature) { return weight[j] * p.key(j, feature); },
          [&](int feature, int column) {
            const int i = begin + column;
            return i < a.shape.dim ? p.state_element(a.d_x, feature, i) : 0.0F;
          });
      for (int reader = 0; reader < a.shape.readers; ++reader) {
        const int head = p.state * a.shape.readers + reader;
        const float* weights = matrices.weights + matrix_at(a.shape, p.chunk, head);
        tile.add_product(
            kMlstmChunk,
            [&](int j, int t) { return weights[t * kMlstmChunk + j]; },
            [&](int t, int column) { return p.read_gradient(t, head, begin + column); });
      }
    }
    tile.each([&](int j, int column, float sum) {
      const int t = static_cast<int>(blockIdx.x) * kMlstmChunk + j;
      if (t < a.shape.tokens && begin + column < a.shape.dim) {
        a.d_v[a.shape.value_row(t, v_head) + begin + column] = store_as<T>(sum);
      }
    });
  }
}

}  // namespace

template <class T>
void plain_mlstm_read_gradients(CudaStream& stream, const MlstmArrays<T>& a) {
  read_scalars_kernel<T>
      <<<mlstm_plain_grid(a.shape, a.shape.heads), kTileThreads, 0, stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
  const dim3 grid = mlstm_plain_grid(a.shape, a.shape.states, mlstm_state_tiles(a.shape.dim));
  read_sums_kernel<T><<<grid, kTileThreads, 0, stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
}

template <class T>
void plain_mlstm_gradients(CudaStream& stream, DeviceScratch& scratch, const MlstmArrays<T>& a) {
  const std::int64_t size =
      static_cast<std::int64_t>(a.shape.heads) * a.shape.chunks * kMlstmChunk * kMlstmChunk;
  const Matrices matrices{scratch.take<float>(size), scratch.take<float>(size)};
  differentiate_reads_kernel<T>
      <<<mlstm_plain_grid(a.shape, a.shape.heads), kTileThreads, 0, stream.handle()>>>(a, matrices);
  BIFOCAL_CUDA(cudaGetLastError());
  differentiate_keys_kernel<T>
      <<<mlstm_plain_grid(a.shape, a.shape.states), kTileThreads, 0, stream.handle()>>>(a,
                                                                                        matrices);
  BIFOCAL_CUDA(cudaGetLastError());
  differentiate_values_kernel<T>
      <<<mlstm_plain_grid(a.shape, a.shape.v_heads), kTileThreads, 0, stream.handle()>>>(a,
                                                                                         matrices);
  BIFOCAL_CUDA(cudaGetLastError());
}

template void plain_mlstm_read_gradients(CudaStream&, const MlstmArrays<float>&);
template void plain_mlstm_read_gradients(CudaStream&, const MlstmArrays<BFloat16>&);
template void plain_mlstm_gradients(CudaStream&, DeviceScratch&, const MlstmArrays<float>&);
template void plain_mlstm_gradients(CudaStream&, DeviceScratch&, const MlstmArrays<BFloat16>&);

}  // namespace bifocal
