// One token of the mLSTM for each of some sequences: states are read and written once. Numbers of
// sequences lie on the device; a row whose sequence has no state reads zeros and writes none.
#include <algorithm>
#include <cmath>

#include "kernels/launch.cuh"
#include "kernels/mlstm_problem.cuh"
#include "kernels/warp.cuh"
#include "ops/mlstm.h"

namespace bifocal {
namespace {

constexpr int kStepThreads = 512;
constexpr int kReadersTogether = 8;

template <class T, class G>
struct StepArrays {
  T* h;
  float *c, *n, *m;
  const T *q, *k, *v;
  const G *i_gate, *f_gate;
  const std::int32_t* sequences;
  int held, states, v_heads, readers, holders, dim;
};

struct Keep {
  float forget, input;
};

// Thread 0 alone moves m. The new m is rounded before it is used, so that C and n stand at the
// scale of the m that is stored.
__device__ inline Keep step_gates(float i_gate, float f_gate, float& m) {
  const double f = static_cast<double>(f_gate);
  const double carried = fmin(f, 0.0) - log1p(exp(-fabs(f))) + static_cast<double>(m);
  const auto i = static_cast<double>(i_gate);
  m = static_cast<float>(fmax(carried, i));
  return {static_cast<float>(exp(carried - static_cast<double>(m))),
          static_cast<float>(exp(i - static_cast<double>(m)))};
}

// The sum over the block's threads, given to each; in a fixed order. Starts with a barrier.
__device__ inline float block_sum(float x, float* partial) {
  __syncthreads();
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) {
    partial[threadIdx.x / 32] = x;
  }
  __syncthreads();
  x = 0.0F;
#pragma unroll
  for (int warp = 0; warp < kStepThreads / 32; ++warp) {
    x += partial[warp];
  }
  return x;
}

// A block for each state of each row. Threads lie over (feature group, N value columns);
// dynamic shared memory: groups * dim sums.
template <class T, class G, int N>
__global__ void __launch_bounds__(kStepThreads) step_kernel(StepArrays<T, G> a) {
  extern __shared__ float sums[];
  __shared__ float partial[kStepThreads / 32];
  __shared__ Keep keep;
  const int state = static_cast<int>(blockIdx.x) % a.states;
  const int row_index = static_cast<int>(blockIdx.x) / a.states;
  const std::int64_t at = blockIdx.x;
  const int sequence = a.sequences[row_index];
  const int dim = a.dim;
  const int thread = static_cast<int>(threadIdx.x);
  T* h = a.h + at * a.readers * dim;
  if (sequence < 0 || sequence >= a.held) {
    for (int i = thread; i < a.readers * dim; i += kStepThreads) {
      h[i] = store_as<T>(0.0F);
    }
    return;
  }
  const T* q = a.q + at * a.readers * dim;
  const T* k = a.k + at * dim;
  const T* v = a.v + (static_cast<std::int64_t>(row_index) * a.v_heads + state / a.holders) * dim;
  const std::int64_t own_state = static_cast<std::int64_t>(sequence) * a.states + state;
  float* c = a.c + own_state * dim * dim;
  float* n = a.n + own_state * dim;
  if (thread == 0) {
    keep = step_gates(load_float(a.i_gate[at]), load_float(a.f_gate[at]), a.m[own_state]);
  }
  __syncthreads();
  for (int feature = thread; feature < dim; feature += kStepThreads) {
    n[feature] = keep.forget * n[feature] + keep.input * load_float(k[feature]);
  }
  const int columns = dim / N;
  const int groups = min(kStepThreads / columns, dim);
  const int group = thread / columns;
  const int column = thread % columns * N;
  for (int first = 0; first < a.readers; first += kReadersTogether) {
    float read[kReadersTogether][N] = {};
    if (group < groups) {
      for (int feature = group; feature < dim; feature += groups) {
        auto row = load_vector<N>(c + static_cast<std::int64_t>(feature) * dim, column / N);
        if (first == 0) {
          const float write = keep.input * load_float(k[feature]);
#pragma unroll
          for (int i = 0; i < N; ++i) {
            row.element[i] = keep.forget * row.element[i] + write * load_float(v[column + i]);
          }
          store_vector<N>(c + static_cast<std::int64_t>(feature) * dim, column / N, row);
        }
#pragma unroll
        for (int reader = 0; reader < kReadersTogether; ++reader) {
          if (first + reader < a.readers) {
            const float weight = load_float(q[(first + reader) * dim + feature]);
#pragma unroll
            for (int i = 0; i < N; ++i) {
              read[reader][i] += weight * row.element[i];
            }
          }
        }
      }
    }
#pragma unroll
    for (int reader = 0; reader < kReadersTogether; ++reader) {
      if (first + reader >= a.readers) {
        break;
      }
      const T* own = q + (first + reader) * dim;
      float product = 0.0F;
      for (int feature = thread; feature < dim; feature += kStepThreads) {
        product += load_float(own[feature]) * n[feature];  // this thread's own writes
      }
      const float factor = 1.0F / (block_sum(product, partial) + kMlstmFloatTiny);
      if (group < groups) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          sums[group * dim + column + i] = read[reader][i];
        }
      }
      __syncthreads();
      for (int i = thread; i < dim; i += kStepThreads) {
        float sum = 0.0F;
        for (int from = 0; from < groups; ++from) {
          sum += sums[from * dim + i];
        }
        h[(first + reader) * dim + i] = store_as<T>(sum * factor);
      }
    }
  }
}

template <class T, class G, int N>
void launch_step(CudaStream& stream, const StepArrays<T, G>& a, std::int64_t blocks) {
  const int columns = a.dim / N;
  const int groups = std::min(kStepThreads / columns, a.dim);
  const std::size_t shared = static_cast<std::size_t>(groups) * a.dim * sizeof(float);
  step_kernel<T, G, N><<<grid_of(blocks), kStepThreads, shared, stream.handle()>>>(a);
  BIFOCAL_CUDA(cudaGetLastError());
}

template <class T, class G>
void step(CudaStream& stream, const MlstmStep& op) {
  StepArrays<T, G> a{};
  a.h = op.h.as<T>();
  a.c = op.c.as<float>();
  a.n = op.n.as<float>();
  a.m = op.m.as<float>();
  a.q = op.q.as<T>();
  a.k = op.k.as<T>();
  a.v = op.v.as<T>();
  a.i_gate = op.i_gate.as<G>();
  a.f_gate = op.f_gate.as<G>();
  a.sequences = op.sequences.as<std::int32_t>();
  a.held = static_cast<int>(op.m.shape[0]);
  a.states = static_cast<int>(op.k.shape[1]);
  a.v_heads = static_cast<int>(op.v.shape[1]);
  a.readers = static_cast<int>(op.q.shape[1] / op.k.shape[1]);
  a.holders = static_cast<int>(op.k.shape[1] / op.v.shape[1]);
  a.dim = static_cast<int>(op.k.shape[2]);
  BIFOCAL_REQUIRE(a.dim <= kStepThreads,
                  "[mlstm step] wanted heads of width {} or less, got {}",
                  kStepThreads,
                  a.dim);
  const std::int64_t blocks = op.k.shape[0] * a.states;
  if (a.dim % 4 == 0 && is_aligned(16, a.c)) {
    launch_step<T, G, 4>(stream, a, blocks);
  } else {
    launch_step<T, G, 1>(stream, a, blocks);
  }
}

}  // namespace

void run(CudaStream& stream, const MlstmStep& op) {
  require_type("mlstm step", "c", op.c, DType::f32);
  if (op.k.size() == 0) {
    return;
  }
  dispatch_device("mlstm step", op.h.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (op.i_gate.dtype == op.h.dtype) {
      step<T, T>(stream, op);
    } else {
      require_type("mlstm step", "i_gate", op.i_gate, DType::f32);
      step<T, float>(stream, op);
    }
  });
}

}  // namespace bifocal
