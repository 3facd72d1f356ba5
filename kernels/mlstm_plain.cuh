// The mLSTM's chunks on CUDA cores: access to one chunk and its weights, for any width and type.
#pragma once

#include "kernels/mlstm_problem.cuh"
#include "kernels/plain_tile.cuh"
#include "kernels/warp.cuh"

namespace bifocal {

static_assert(kMlstmChunk == kTile);

// One chunk of one state, or of one query head of it.
template <class T>
struct MlstmPlace {
  const MlstmArrays<T>& a;
  int chunk, state, begin, length;

  __device__ MlstmPlace(const MlstmArrays<T>& arrays, int chunk_index, int state_index)
      : a(arrays),
        chunk(chunk_index),
        state(state_index),
        begin(chunk_index * kMlstmChunk),
        length(arrays.shape.length(chunk_index)) {}

  __device__ const double* row() const {
    return a.scalars.row + static_cast<std::int64_t>(state) * a.shape.tokens + begin;
  }

  __device__ const double* column() const {
    return a.scalars.column + static_cast<std::int64_t>(state) * a.shape.tokens + begin;
  }

  // D_tj, 0 where t does not see j.
  __device__ float decay(int t, int j) const {
    if (t >= length || j > t || begin + j < a.scalars.first[begin + t]) {
      return 0.0F;
    }
    return mlstm_weight(row()[t], column()[j]);
  }

  // u_t: what the entering state keeps up to t.
  __device__ float carry(int t) const {
    if (t >= length || a.scalars.first[begin + t] >= 0) {
      return 0.0F;
    }
    return mlstm_weight(
        row()[t], a.scalars.before[static_cast<std::int64_t>(state) * a.shape.chunks + chunk]);
  }

  __device__ float key(int j, int feature) const {
    return j < length && feature < a.shape.dim
               ? load_float(a.k[a.shape.key_row(begin + j, state) + feature])
               : 0.0F;
  }

  // Of [v, 1].
  __device__ float value(int j, int i) const {
    if (j >= length || i > a.shape.dim) {
      return 0.0F;
    }
    return i == a.shape.dim
               ? 1.0F
               : load_float(a.v[a.shape.value_row(begin + j, state / a.shape.holders) + i]);
  }

  // Of a [tokens, heads, dim] tensor.
  __device__ float at_head(const T* x, int t, int head, int i) const {
    return t < length && i < a.shape.dim ? load_float(x[a.shape.head_row(begin + t, head) + i])
                                         : 0.0F;
  }

  __device__ std::int64_t head_scalar(int t, int head) const {
    return static_cast<std::int64_t>(head) * a.shape.tokens + begin + t;
  }

  // [e_t, r_t], the gradient of a read by the weighted sums of [v, 1].
  __device__ float read_gradient(int t, int head, int i) const {
    if (t >= length || i > a.shape.dim) {
      return 0.0F;
    }
    return i == a.shape.dim ? a.delta[head_scalar(t, head)]
                            : a.inverse[head_scalar(t, head)] * at_head(a.d_h, t, head, i);
  }

  // Of [C, n] as stored in x: row feature, column i.
  __device__ float state_element(const float* x, int feature, int i) const {
    const int dim = a.shape.dim;
    if (feature >= dim || i > dim) {
      return 0.0F;
    }
    const float* own = x + a.shape.state_at(chunk, state);
    return i == dim ? own[static_cast<std::int64_t>(dim) * dim + feature]
                    : own[static_cast<std::int64_t>(feature) * dim + i];
  }
};

// Tile `tile` of the tiles of [C, n]: its first feature and value column.
struct MlstmStateTile {
  int feature, column;

  __device__ MlstmStateTile(int tile, int dim) {
    const int columns = dim / kTile + 1;
    feature = tile / columns * kTile;
    column = tile % columns * kTile;
  }
};

inline int mlstm_state_tiles(int dim) {
  return static_cast<int>(ceil_div(dim, kTile)) * (dim / kTile + 1);
}

__device__ inline void store_state_tile(const MlstmShape& shape,
                                        float* own,
                                        const MlstmStateTile& place,
                                        PlainTile& tile) {
  const int dim = shape.dim;
  tile.each([&](int row, int column, float sum) {
    const int feature = place.feature + row;
    const int i = place.column + column;
    if (feature < dim && i <= dim) {
      own[i == dim ? static_cast<std::int64_t>(dim) * dim + feature
                   : static_cast<std::int64_t>(feature) * dim + i] = sum;
    }
  });
}

// D * q k^T of one head, the carries and the normalisers of its reads.
struct MlstmWeights {
  float weight[kMlstmChunk][kMlstmChunk + 1];
  float carry[kMlstmChunk];
  float normaliser[kMlstmChunk];
};

template <class T>
__device__ void weigh_keys(const MlstmPlace<T>& p, int head, MlstmWeights& out) {
  const int thread = static_cast<int>(threadIdx.x);
  const int dim = p.a.shape.dim;
  if (thread < kMlstmChunk) {
    out.carry[thread] = p.carry(thread);
  }
  PlainTile tile;
  tile.clear();
  tile.add_product(
      dim,
      [&](int t, int i) { return p.at_head(p.a.q, t, head, i); },
      [&](int i, int j) { return p.key(j, i); });
  tile.each([&](int t, int j, float sum) { out.weight[t][j] = p.decay(t, j) * sum; });
  __syncthreads();
  const int t = thread / 4;
  float sum = 0.0F;
  for (int j = thread % 4; j <= t; j += 4) {
    sum += out.weight[t][j];
  }
  if (out.carry[t] != 0.0F) {
    float read = 0.0F;
    for (int i = thread % 4; i < dim; i += 4) {
      read += p.at_head(p.a.q, t, head, i) * p.state_element(p.a.x, i, dim);
    }
    sum += out.carry[t] * read;
  }
  sum = quad_sum(sum);
  if (thread % 4 == 0) {
    out.normaliser[t] = sum + kMlstmFloatTiny;
  }
  __syncthreads();
}

inline dim3 mlstm_plain_grid(const MlstmShape& shape, int rows, int tiles = 1) {
  return dim3(static_cast<unsigned>(shape.chunks),
              static_cast<unsigned>(rows),
              static_cast<unsigned>(tiles));
}

}  // namespace bifocal
