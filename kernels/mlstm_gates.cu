// The mLSTM's gates: the max-plus scan for m in double, and the gates' gradients.
// A span of tokens acts on m as x -> max(x + decay, m), or gives m alone where a document starts
// in it; such spans compose, so chunks are scanned in parallel, then their composition.
#include <cmath>

#include "kernels/mlstm_problem.cuh"
#include "kernels/warp.cuh"

namespace bifocal {
namespace {

constexpr int kWarps = kBlockThreads / kWarp;
constexpr int kTokensPerLane = kMlstmChunk / kWarp;
constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;

__device__ inline double minus_infinity() {
  return -HUGE_VAL;
}

struct Span {
  double decay, m;
  int starts;  // whether a document starts inside
};

__device__ inline Span no_tokens() {
  return {0.0, minus_infinity(), 0};
}

__device__ inline Span join(const Span& left, const Span& right) {
  if (right.starts != 0) {
    return right;
  }
  return {left.decay + right.decay, fmax(left.m + right.decay, right.m), left.starts};
}

__device__ inline Span shuffle_up(const Span& span, int distance) {
  return {__shfl_up_sync(kAllLanes, span.decay, distance),
          __shfl_up_sync(kAllLanes, span.m, distance),
          __shfl_up_sync(kAllLanes, span.starts, distance)};
}

__device__ inline Span shuffle_from(const Span& span, int lane) {
  return {__shfl_sync(kAllLanes, span.decay, lane),
          __shfl_sync(kAllLanes, span.m, lane),
          __shfl_sync(kAllLanes, span.starts, lane)};
}

// Of this lane and all before it.
__device__ inline Span warp_scan(Span span, int lane) {
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const Span left = shuffle_up(span, distance);
    if (lane >= distance) {
      span = join(left, span);
    }
  }
  return span;
}

// Float32 gives each token's log decay seven digits; sums of them keep those in double.
__device__ inline double log_sigmoid(float x) {
  return static_cast<double>(fminf(x, 0.0F) - log1pf(expf(-fabsf(x))));
}

struct GateScan {
  MlstmShape shape;
  MlstmScalars scalars;
  const std::uint8_t* starts;
  const float* initial_m;
  double* chunk_decay;  // [states, chunks], of each chunk alone
  double* chunk_m;
  int* chunk_starts;
};

// A warp for each chunk of each state. Leaves b in row and m of the chunk alone in column.
template <class G>
__global__ void __launch_bounds__(kBlockThreads)
    scan_chunks_kernel(GateScan scan, const G* i_gate, const G* f_gate) {
  const MlstmShape& shape = scan.shape;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t item =
      static_cast<std::int64_t>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  if (item >= static_cast<std::int64_t>(shape.chunks) * shape.states) {
    return;
  }
  const int chunk = static_cast<int>(item / shape.states);
  const int state = static_cast<int>(item % shape.states);
  const int begin = chunk * kMlstmChunk + lane * kTokensPerLane;
  Span spans[kTokensPerLane];
  int starts[kTokensPerLane];
  Span sum = no_tokens();
  int last_start = -1;
#pragma unroll
  for (int i = 0; i < kTokensPerLane; ++i) {
    const int t = begin + i;
    if (t < shape.tokens) {
      const std::int64_t gate = static_cast<std::int64_t>(t) * shape.states + state;
      const int start = scan.starts[t] != 0 ? 1 : 0;
      sum = join(sum,
                 {log_sigmoid(load_float(f_gate[gate])),
                  static_cast<double>(load_float(i_gate[gate])),
                  start});
      last_start = start != 0 ? t : last_start;
    }
    spans[i] = sum;
    starts[i] = last_start;
  }
  const Span up_to = warp_scan(sum, lane);
  Span before = shuffle_up(up_to, 1);
  if (lane == 0) {
    before = no_tokens();
  }
  int first = last_start;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int left = __shfl_up_sync(kAllLanes, first, distance);
    first = lane >= distance ? max(first, left) : first;
  }
  first = __shfl_up_sync(kAllLanes, first, 1);
  first = lane == 0 ? -1 : first;
#pragma unroll
  for (int i = 0; i < kTokensPerLane; ++i) {
    const int t = begin + i;
    if (t < shape.tokens) {
      const Span span = join(before, spans[i]);
      const std::int64_t at = static_cast<std::int64_t>(state) * shape.tokens + t;
      scan.scalars.row[at] = span.decay;
      scan.scalars.column[at] = span.m;
      if (state == 0) {
        scan.scalars.first[t] = max(first, starts[i]);
      }
    }
  }
  if (lane == kWarp - 1) {
    const std::int64_t at = static_cast<std::int64_t>(state) * shape.chunks + chunk;
    scan.chunk_decay[at] = up_to.decay;
    scan.chunk_m[at] = up_to.m;
    scan.chunk_starts[at] = up_to.starts;
  }
}

// A warp for each state: m before each chunk and after the last.
__global__ void __launch_bounds__(kWarp) scan_spans_kernel(GateScan scan) {
  const int chunks = scan.shape.chunks;
  const int state = static_cast<int>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x);
  const std::int64_t base = static_cast<std::int64_t>(state) * chunks;
  const double initial =
      scan.initial_m == nullptr ? minus_infinity() : static_cast<double>(scan.initial_m[state]);
  const auto load = [&](int chunk) {
    return chunk < chunks ? Span{scan.chunk_decay[base + chunk],
                                 scan.chunk_m[base + chunk],
                                 scan.chunk_starts[base + chunk]}
                          : no_tokens();
  };
  Span all = no_tokens();
  Span next = load(lane);
  for (int begin = 0; begin < chunks; begin += kWarp) {
    const int chunk = begin + lane;
    const Span span = next;
    next = load(chunk + kWarp);  // ahead, while this one's scan runs
    const Span up_to = join(all, warp_scan(span, lane));
    Span before = shuffle_up(up_to, 1);
    before = lane == 0 ? all : before;
    if (chunk < chunks) {
      const double m = before.starts != 0 ? before.m : fmax(initial + before.decay, before.m);
      scan.scalars.before[base + chunk] = m * kLog2E;
    }
    all = shuffle_from(up_to, kWarp - 1);
  }
  if (lane == 0) {
    scan.scalars.last_m[state] = all.starts != 0 ? all.m : fmax(initial + all.decay, all.m);
    scan.scalars.total_decay[state] = all.starts != 0 ? minus_infinity() : all.decay;
  }
}

// A thread for each token of each state: the scalars as kernels read them.
template <class G>
__global__ void __launch_bounds__(kBlockThreads)
    finish_scalars_kernel(GateScan scan, const G* i_gate) {
  const MlstmShape& shape = scan.shape;
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  if (at >= static_cast<std::int64_t>(shape.tokens) * shape.states) {
    return;
  }
  const int state = static_cast<int>(at / shape.tokens);
  const int t = static_cast<int>(at % shape.tokens);
  const int chunk = t / kMlstmChunk;
  const std::int64_t chunk_at = static_cast<std::int64_t>(state) * shape.chunks + chunk;
  const double before =
      scan.scalars.first[t] < 0 ? scan.scalars.before[chunk_at] : minus_infinity();
  const double decay = scan.scalars.row[at];
  const double m = fmax(before * kLn2 + decay, scan.scalars.column[at]);
  const double row = (decay - m) * kLog2E;
  const double input =
      static_cast<double>(load_float(i_gate[static_cast<std::int64_t>(t) * shape.states + state]));
  scan.scalars.row[at] = row;
  scan.scalars.column[at] = (input - decay) * kLog2E;
  if (t == min(shape.tokens, (chunk + 1) * kMlstmChunk) - 1) {
    scan.scalars.pass[chunk_at] = mlstm_weight(row, before);
  }
}

// The gradient of the log decay at t sums what decays through t: weights of the chunk's tokens
// (through), reads of the entering state at t and later, what earlier tokens leave in the state
// after the chunk, and what passes the chunk whole. Sums of like terms, never a difference of
// larger sums, which would lose all digits where little survives a token.
template <class G>
__global__ void __launch_bounds__(kMlstmChunk) gate_gradients_kernel(
    MlstmShape shape, MlstmLogGradients logs, const G* f_gate, G* d_i_gate, G* d_f_gate) {
  __shared__ float read[kMlstmChunk];
  __shared__ float left[kMlstmChunk];
  const int chunk = static_cast<int>(blockIdx.x);
  const int state = static_cast<int>(blockIdx.y);
  const int i = static_cast<int>(threadIdx.x);
  const int t = chunk * kMlstmChunk + i;
  const int length = shape.length(chunk);
  float through = 0.0F;
  float written = 0.0F;
  read[i] = 0.0F;
  left[i] = 0.0F;
  const auto part_at = [&](int parts, int part) {
    return (static_cast<std::int64_t>(state) * parts + part) * shape.tokens + t;
  };
  if (i < length) {
    for (int part = 0; part < logs.head_parts; ++part) {
      through += logs.through[part_at(logs.head_parts, part)];
      written += logs.written[part_at(logs.head_parts, part)];
    }
    for (int part = 0; part < logs.read_parts; ++part) {
      read[i] += logs.read[part_at(logs.read_parts, part)];
    }
    for (int part = 0; part < logs.state_parts; ++part) {
      left[i] += logs.left[part_at(logs.state_parts, part)];
    }
  }
  __syncthreads();
  if (i >= length) {
    return;
  }
  float sum = through;
  for (int part = 0; part < logs.state_parts; ++part) {
    sum += logs.passed[(static_cast<std::int64_t>(state) * logs.state_parts + part) * shape.chunks +
                       chunk];
  }
  for (int later = length - 1; later >= i; --later) {
    sum += read[later];
  }
  for (int earlier = 0; earlier < i; ++earlier) {
    sum += left[earlier];
  }
  const std::int64_t gate = static_cast<std::int64_t>(t) * shape.states + state;
  const float f = load_float(f_gate[gate]);
  const float e = expf(-fabsf(f));
  const float closing = (f > 0.0F ? e : 1.0F) / (1.0F + e);  // sigmoid(-f)
  d_i_gate[gate] = store_as<G>(written + left[i]);
  d_f_gate[gate] = store_as<G>(closing * sum);
}

}  // namespace

MlstmShape mlstm_shape(const MlstmSizes& sizes) {
  constexpr std::int64_t kMostTokens = 1LL << 30;
  BIFOCAL_REQUIRE(sizes.tokens <= kMostTokens && sizes.heads <= 0xffff && sizes.head_dim <= 0x4000,
                  "[mlstm] wanted at most {} tokens, 65535 heads and width 16384, got {}, {} and "
                  "{}: cut the row",
                  kMostTokens,
                  sizes.tokens,
                  sizes.heads,
                  sizes.head_dim);
  MlstmShape shape{};
  shape.tokens = static_cast<int>(sizes.tokens);
  shape.chunks = static_cast<int>(ceil_div(sizes.tokens, kMlstmChunk));
  shape.heads = static_cast<int>(sizes.heads);
  shape.states = static_cast<int>(sizes.states);
  shape.v_heads = static_cast<int>(sizes.v_heads);
  shape.dim = static_cast<int>(sizes.head_dim);
  shape.readers = static_cast<int>(sizes.readers());
  shape.holders = static_cast<int>(sizes.holders());
  return shape;
}

MlstmScalars scan_mlstm_gates(CudaStream& stream,
                              DeviceScratch& scratch,
                              const MlstmShape& shape,
                              const MlstmInputs& inputs) {
  const std::int64_t rows = static_cast<std::int64_t>(shape.states) * shape.tokens;
  const std::int64_t spans = static_cast<std::int64_t>(shape.states) * shape.chunks;
  GateScan scan{};
  scan.shape = shape;
  scan.scalars.row = scratch.take<double>(rows);
  scan.scalars.column = scratch.take<double>(rows);
  scan.scalars.before = scratch.take<double>(spans);
  scan.scalars.pass = scratch.take<float>(spans);
  scan.scalars.first = scratch.take<int>(shape.tokens);
  scan.scalars.last_m = scratch.take<double>(shape.states);
  scan.scalars.total_decay = scratch.take<double>(shape.states);
  scan.chunk_decay = scratch.take<double>(spans);
  scan.chunk_m = scratch.take<double>(spans);
  scan.chunk_starts = scratch.take<int>(spans);
  scan.starts = shape.tokens == 0 ? nullptr : inputs.starts.as<std::uint8_t>();
  scan.initial_m = inputs.initial ? inputs.initial.m.as<float>() : nullptr;
  dispatch_device("mlstm gates", inputs.i_gate.dtype, [&](auto zero) {
    using G = decltype(zero);
    const G* i_gate = inputs.i_gate.as<G>();
    if (shape.tokens > 0) {
      scan_chunks_kernel<G>
          <<<grid_of(ceil_div(spans, kWarps)), kBlockThreads, 0, stream.handle()>>>(
              scan, i_gate, inputs.f_gate.as<G>());
      BIFOCAL_CUDA(cudaGetLastError());
    }
    scan_spans_kernel<<<grid_of(shape.states), kWarp, 0, stream.handle()>>>(scan);
    BIFOCAL_CUDA(cudaGetLastError());
    if (shape.tokens > 0) {
      finish_scalars_kernel<G>
          <<<grid_of(ceil_div(rows, kBlockThreads)), kBlockThreads, 0, stream.handle()>>>(scan,
                                                                                          i_gate);
      BIFOCAL_CUDA(cudaGetLastError());
    }
  });
  return scan.scalars;
}

void mlstm_gate_gradients(CudaStream& stream,
                          const MlstmShape& shape,
                          const MlstmLogGradients& logs,
                          const MlstmBackward& op) {
  if (shape.tokens == 0) {
    return;
  }
  dispatch_device("mlstm gate gradients", op.d_i_gate.dtype, [&](auto zero) {
    using G = decltype(zero);
    const dim3 grid(static_cast<unsigned>(shape.chunks), static_cast<unsigned>(shape.states));
    gate_gradients_kernel<G><<<grid, kMlstmChunk, 0, stream.handle()>>>(
        shape, logs, op.inputs.f_gate.as<G>(), op.d_i_gate.as<G>(), op.d_f_gate.as<G>());
    BIFOCAL_CUDA(cudaGetLastError());
  });
}

}  // namespace bifocal
