// The mLSTM's states between chunks, and what crosses ranks. A thread owns one number of a state
// and walks over the chunks, so the order of its sum never changes.
#include <cmath>

#include "kernels/mlstm_problem.cuh"

namespace bifocal {
namespace {

constexpr int kAhead = 12;        // chunks whose numbers are under way
constexpr int kScanThreads = 64;  // of a block

// States are stored with m rounded to float32: what brings C and n to that scale.
__device__ inline float scale_of_rounded(double m) {
  return m == -HUGE_VAL ? 1.0F
                        : static_cast<float>(exp(m - static_cast<double>(static_cast<float>(m))));
}

struct Scan {
  MlstmShape shape;
  const float* pass;
  const double* last_m;
  float* x;
  MlstmScanTargets targets;
  bool reverse;
};

__device__ inline float start_of(const Scan& scan, int state, std::int64_t element) {
  const std::int64_t square = static_cast<std::int64_t>(scan.shape.dim) * scan.shape.dim;
  if (element < square) {
    return scan.targets.start_c == nullptr ? 0.0F : scan.targets.start_c[state * square + element];
  }
  const std::int64_t feature = static_cast<std::int64_t>(state) * scan.shape.dim + element - square;
  return scan.targets.start_n == nullptr ? 0.0F : scan.targets.start_n[feature];
}

__device__ inline void store_end(const Scan& scan, int state, std::int64_t element, float value) {
  const std::int64_t square = static_cast<std::int64_t>(scan.shape.dim) * scan.shape.dim;
  if (scan.targets.end_c == nullptr) {
    return;
  }
  if (element < square) {
    scan.targets.end_c[state * square + element] = value;
  } else {
    scan.targets.end_n[static_cast<std::int64_t>(state) * scan.shape.dim + element - square] =
        value;
  }
}

// N numbers of kAhead neighbouring chunks, in the scan's direction.
template <int N>
struct ChunkBatch {
  Vector<float, N> own[kAhead];
  float pass[kAhead];

  __device__ void load(const Scan& scan, const float* x, const float* all_pass, int begin) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int step = min(begin + i, scan.shape.chunks - 1);  // past the end: not used
      const int chunk = scan.reverse ? scan.shape.chunks - 1 - step : step;
      own[i] = load_vector<N>(x + scan.shape.state_at(chunk, 0), 0);
      pass[i] = all_pass[chunk];
    }
  }
};

// x[chunk] = what reaches the chunk in the scan's direction; what leaves it is pass times that plus
// the old x[chunk]. Where nothing passes, what reaches is not multiplied: it may be anything. A
// thread has N neighbouring numbers, and the chunks to come are under way while it works.
template <int N>
__global__ void __launch_bounds__(kScanThreads) scan_states_kernel(Scan scan) {
  const MlstmShape& shape = scan.shape;
  const std::int64_t element =
      (static_cast<std::int64_t>(blockIdx.x) * kScanThreads + threadIdx.x) * N;
  const int state = static_cast<int>(blockIdx.y);
  if (element >= shape.state_size()) {
    return;
  }
  const float scale = scale_of_rounded(scan.last_m[state]);
  float reached[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    reached[j] = start_of(scan, state, element + j) * (scan.reverse ? scale : 1.0F);
  }
  float* x = scan.x + shape.state_at(0, state) + element;
  const float* pass = scan.pass + static_cast<std::int64_t>(state) * shape.chunks;
  ChunkBatch<N> batch;
  if (shape.chunks > 0) {
    batch.load(scan, x, pass, 0);
  }
  for (int begin = 0; begin < shape.chunks; begin += kAhead) {
    ChunkBatch<N> next;
    next.load(scan, x, pass, begin + kAhead);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int step = begin + i;
      if (step < shape.chunks) {
        const int chunk = scan.reverse ? shape.chunks - 1 - step : step;
        Vector<float, N> before;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const float own = batch.own[i].element[j];
          before.element[j] = reached[j];
          reached[j] = batch.pass[i] == 0.0F ? own : own + batch.pass[i] * reached[j];
        }
        store_vector<N>(x + shape.state_at(chunk, 0), 0, before);
      }
    }
    batch = next;
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    store_end(scan, state, element + j, scan.reverse ? reached[j] : reached[j] * scale);
  }
}

template <int N>
void launch_scan(CudaStream& stream, const Scan& scan) {
  const dim3 grid(static_cast<unsigned>(ceil_div(scan.shape.state_size(), kScanThreads * N)),
                  static_cast<unsigned>(scan.shape.states));
  scan_states_kernel<N><<<grid, kScanThreads, 0, stream.handle()>>>(scan);
  BIFOCAL_CUDA(cudaGetLastError());
}

void launch_scan(CudaStream& stream, const Scan& scan) {
  scan.shape.dim % 4 == 0 ? launch_scan<4>(stream, scan) : launch_scan<1>(stream, scan);
}

// The parts of a packed summary: C, n, m, decay; of a packed gradient: d_C, d_n, factor.
struct SummaryPart {
  std::int64_t states, dim;

  __host__ __device__ std::int64_t n() const { return states * dim * dim; }

  __host__ __device__ std::int64_t scalars() const { return n() + states * dim; }

  // Of element `element` of [C, n].
  __device__ std::int64_t state_of(std::int64_t element) const {
    return element < n() ? element / (dim * dim) : (element - n()) / dim;
  }
};

__device__ inline float weight_at_scale(double log_weight, double m) {
  return m == -HUGE_VAL ? 0.0F : static_cast<float>(exp(log_weight - m));
}

// Rounded as it is stored; every rank finds the same bits.
__device__ inline double outgoing_m(double incoming, double decay, double own) {
  return static_cast<double>(static_cast<float>(fmax(incoming + decay, own)));
}

__global__ void __launch_bounds__(kBlockThreads)
    fold_kernel(SummaryPart part, int count, const float* summaries, float* c, float* n, float* m) {
  const std::int64_t element = static_cast<std::int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  const std::int64_t size = part.scalars();
  if (element >= size) {
    return;
  }
  const std::int64_t state = part.state_of(element);
  const std::int64_t stride = size + 2 * part.states;
  float sum = 0.0F;
  double incoming = -HUGE_VAL;
  for (int shard = 0; shard < count; ++shard) {
    const float* in = summaries + shard * stride;
    const auto own = static_cast<double>(in[size + state]);
    const auto decay = static_cast<double>(in[size + part.states + state]);
    const double out = outgoing_m(incoming, decay, own);
    sum = weight_at_scale(incoming + decay, out) * sum + weight_at_scale(own, out) * in[element];
    incoming = out;
  }
  (element < part.n() ? c + element : n + (element - part.n()))[0] = sum;
  // The first feature's thread of n writes the state's m.
  if (element >= part.n() && (element - part.n()) % part.dim == 0) {
    m[state] = static_cast<float>(incoming);
  }
}

__global__ void __launch_bounds__(kBlockThreads) gradient_fold_kernel(
    SummaryPart part, int count, const float* summaries, float* d_c, float* d_n) {
  const std::int64_t element = static_cast<std::int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  const std::int64_t size = part.scalars();
  if (element >= size) {
    return;
  }
  const std::int64_t state = part.state_of(element);
  const std::int64_t stride = size + part.states;
  float sum = 0.0F;
  for (int shard = count - 1; shard >= 0; --shard) {
    const float* in = summaries + shard * stride;
    sum = in[element] + in[size + state] * sum;
  }
  (element < part.n() ? d_c + element : d_n + (element - part.n()))[0] = sum;
}

__global__ void summary_scalars_kernel(MlstmScalars scalars, int states, float* m, float* decay) {
  const int state = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (state < states) {
    m[state] = static_cast<float>(scalars.last_m[state]);
    if (decay != nullptr) {
      decay[state] = static_cast<float>(scalars.total_decay[state]);
    }
  }
}

// The numbers are rounded as MlstmSummarise rounds them, so that scales meet where shards do.
__global__ void gradient_factor_kernel(
    MlstmScalars scalars, MlstmScalars alone, int states, const float* initial_m, float* factor) {
  const int state = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (state < states) {
    const auto total = static_cast<double>(static_cast<float>(scalars.total_decay[state]));
    const auto own = static_cast<double>(static_cast<float>(alone.last_m[state]));
    const auto incoming = static_cast<double>(initial_m[state]);
    factor[state] = weight_at_scale(incoming + total, outgoing_m(incoming, total, own));
  }
}

unsigned blocks_of(std::int64_t threads) {
  return static_cast<unsigned>(ceil_div(threads, kBlockThreads));
}

}  // namespace

void scan_mlstm_states(CudaStream& stream,
                       const MlstmShape& shape,
                       const MlstmScalars& scalars,
                       float* x,
                       const MlstmScanTargets& targets) {
  launch_scan(stream, {shape, scalars.pass, scalars.last_m, x, targets, false});
}

void scan_mlstm_gradients(CudaStream& stream,
                          const MlstmShape& shape,
                          const MlstmScalars& scalars,
                          float* d_x,
                          const MlstmScanTargets& targets) {
  launch_scan(stream, {shape, scalars.pass, scalars.last_m, d_x, targets, true});
}

void store_mlstm_scalars(
    CudaStream& stream, const MlstmScalars& scalars, int states, float* m, float* decay) {
  summary_scalars_kernel<<<blocks_of(states), kBlockThreads, 0, stream.handle()>>>(
      scalars, states, m, decay);
  BIFOCAL_CUDA(cudaGetLastError());
}

void store_mlstm_factor(CudaStream& stream,
                        const MlstmScalars& scalars,
                        const MlstmScalars& alone,
                        int states,
                        const float* initial_m,
                        float* factor) {
  gradient_factor_kernel<<<blocks_of(states), kBlockThreads, 0, stream.handle()>>>(
      scalars, alone, states, initial_m, factor);
  BIFOCAL_CUDA(cudaGetLastError());
}

void run(CudaStream& stream, const MlstmFold& op) {
  const SummaryPart part{op.state.n.shape[0], op.state.n.shape[1]};
  const auto count = static_cast<int>(op.summaries.shape[0]);
  const float* summaries = count == 0 ? nullptr : op.summaries.as<float>();
  fold_kernel<<<grid_of(ceil_div(part.scalars(), kBlockThreads)),
                kBlockThreads,
                0,
                stream.handle()>>>(part,
                                   count,
                                   summaries,
                                   op.state.c.as<float>(),
                                   op.state.n.as<float>(),
                                   op.state.m.as<float>());
  BIFOCAL_CUDA(cudaGetLastError());
}

void run(CudaStream& stream, const MlstmGradientFold& op) {
  const SummaryPart part{op.d_n.shape[0], op.d_n.shape[1]};
  const auto count = static_cast<int>(op.summaries.shape[0]);
  const float* summaries = count == 0 ? nullptr : op.summaries.as<float>();
  gradient_fold_kernel<<<grid_of(ceil_div(part.scalars(), kBlockThreads)),
                         kBlockThreads,
                         0,
                         stream.handle()>>>(
      part, count, summaries, op.d_c.as<float>(), op.d_n.as<float>());
  BIFOCAL_CUDA(cudaGetLastError());
}

}  // namespace bifocal
