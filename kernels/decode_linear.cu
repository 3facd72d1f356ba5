// Matrix products of a few rows: time is that of reading the weights. bfloat16 goes through tensor
// cores, whose columns are the rows of x: a column's sums do not depend on the others, and each
// weight is read once for all of them.
#include "kernels/cuda_stream.h"
#include "kernels/launch.cuh"
#include "kernels/tensor_core.cuh"
#include "kernels/warp.cuh"
#include "ops/decode_linear.h"

namespace bifocal {
namespace {

constexpr const char* kWhere = "decode_linear";
constexpr int kWarps = kBlockThreads / kWarp;
constexpr int kTileOutputs = 16;  // of a warp: rows of the left operand
constexpr int kTileRows = 8;      // of x: columns of the right operand
constexpr int kStep = 64;         // inputs that a warp takes at a time

// A bias of either type, or none.
struct Bias {
  const float* wide = nullptr;
  const BFloat16* narrow = nullptr;

  __device__ float at(std::int64_t i) const {
    return wide != nullptr ? wide[i] : narrow != nullptr ? load_float(narrow[i]) : 0.0F;
  }
};

// Eight numbers, or zeros past the end and where there is no such row.
__device__ inline uint4 load_eight(const BFloat16* row, std::int64_t i, std::int64_t size) {
  if (row == nullptr || i >= size) {
    return uint4{0, 0, 0, 0};
  }
  return *reinterpret_cast<const uint4*>(row + i);
}

// The same of weights, which are read once: they must not push x out of the cache.
__device__ inline uint4 load_weights(const BFloat16* row, std::int64_t i, std::int64_t size) {
  if (row == nullptr || i >= size) {
    return uint4{0, 0, 0, 0};
  }
  return __ldcs(reinterpret_cast<const uint4*>(row + i));
}

// sums += 16 outputs x 8 rows over 32 inputs. Lane t of four holds inputs 8 t to 8 t + 7 of its
// rows on both sides. The products pair them in another order than the tensor core's, in which each
// lane would hold pairs 8 apart; sums over all 32 are the same sums.
__device__ inline void add_products(float (&sums)[4],
                                    const uint4& low,
                                    const uint4& high,
                                    const uint4& x) {
  const std::uint32_t first[4] = {low.x, high.x, low.y, high.y};
  const std::uint32_t second[4] = {low.z, high.z, low.w, high.w};
  multiply_add(sums, first, x.x, x.y);
  multiply_add(sums, second, x.z, x.w);
}

// What a lane reads: two rows of weights and a row of x in each of kTiles tiles; null past the end.
template <int kTiles>
struct LaneRows {
  const BFloat16* low;
  const BFloat16* high;
  const BFloat16* x[kTiles];
  std::int64_t in;

  static constexpr int kBatch = kTiles == 1 ? 4 : 3;  // steps whose weights are in flight

  // Steps first, first + stride, ... of the inputs, always in this order.
  __device__ void add(float (&sums)[kTiles][4], std::int64_t first, std::int64_t stride) const {
    const std::int64_t lane = threadIdx.x % 4 * 8;
    for (std::int64_t step = first; step * kStep < in; step += kBatch * stride) {
      uint4 weights[kBatch][2][2];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const std::int64_t i = (step + b * stride) * kStep + half * (kStep / 2) + lane;
          weights[b][half][0] = load_weights(low, i, in);
          weights[b][half][1] = load_weights(high, i, in);
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const std::int64_t i = (step + b * stride) * kStep + half * (kStep / 2) + lane;
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            const uint4 inputs = load_eight(x[tile], i, in);
            add_products(sums[tile], weights[b][half][0], weights[b][half][1], inputs);
          }
        }
      }
    }
  }
};

// A block owns 16 outputs of up to 8 kTiles rows; its warps take every eighth step of the inputs.
template <int kTiles, class Out>
__global__ void __launch_bounds__(kBlockThreads, kTiles == 1 ? 2 : 1)
    decode_linear_kernel(Out* y,
                         const BFloat16* x,
                         const BFloat16* weight,
                         Bias bias,
                         std::int64_t rows,
                         std::int64_t in,
                         std::int64_t out) {
  constexpr int kRows = kTiles * kTileRows;
  __shared__ float partial[kWarps][kRows][kTileOutputs];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int group = static_cast<int>(threadIdx.x) % kWarp / 4;
  const int column = static_cast<int>(threadIdx.x) % 4 * 2;
  const std::int64_t output = static_cast<std::int64_t>(blockIdx.x) * kTileOutputs;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.y) * kRows;

  LaneRows<kTiles> lane{};
  lane.in = in;
  lane.low = output + group < out ? weight + (output + group) * in : nullptr;
  lane.high = output + group + 8 < out ? weight + (output + group + 8) * in : nullptr;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const std::int64_t r = row + tile * kTileRows + group;
    lane.x[tile] = r < rows ? x + r * in : nullptr;
  }
  float sums[kTiles][4] = {};
  lane.add(sums, warp, kWarps);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      partial[warp][tile * kTileRows + column + i % 2][group + i / 2 * 8] = sums[tile][i];
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kTileOutputs; i += kBlockThreads) {
    const std::int64_t r = row + i / kTileOutputs;
    const std::int64_t o = output + i % kTileOutputs;
    if (r < rows && o < out) {
      float sum = 0.0F;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        sum += partial[w][i / kTileOutputs][i % kTileOutputs];
      }
      y[r * out + o] = store_as<Out>(sum + bias.at(o));
    }
  }
}

// Any types and sizes: a warp owns an output.
template <class Out, class In, class Stored>
__global__ void __launch_bounds__(kBlockThreads) plain_linear_kernel(Out* y,
                                                                     const In* x,
                                                                     const Stored* weight,
                                                                     Bias bias,
                                                                     std::int64_t rows,
                                                                     std::int64_t in,
                                                                     std::int64_t out) {
  const std::int64_t o = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (o >= out) {
    return;
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    float sum = 0.0F;
    for (std::int64_t i = lane; i < in; i += kWarp) {
      sum += load_float(weight[o * in + i]) * load_float(x[r * in + i]);
    }
    sum = warp_sum(sum);
    if (lane == 0) {
      y[r * out + o] = store_as<Out>(sum + bias.at(o));
    }
  }
}

// softmax of a row of shared memory by one warp, written to memory.
template <class Out>
__device__ void write_softmax(Out* y, const float* logits, int size) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float largest = logits[0];
  for (int i = lane; i < size; i += kWarp) {
    largest = fmaxf(largest, logits[i]);
  }
  largest = warp_max(largest);
  float sum = 0.0F;
  for (int i = lane; i < size; i += kWarp) {
    sum += expf(logits[i] - largest);
  }
  sum = warp_sum(sum);
  for (int i = lane; i < size; i += kWarp) {
    y[i] = store_as<Out>(expf(logits[i] - largest) / sum);
  }
}

template <class T, class Stored>
struct FeatureMap {
  T* y;
  const T* x;
  const Stored* weight;
  std::int64_t rows, heads, x_heads;

  __device__ T* to(std::int64_t row, std::int64_t head, int dim) const {
    return y + (row * heads + head) * dim;
  }

  const __device__ T* from(std::int64_t row, std::int64_t head, int dim) const {
    return x + (row * x_heads + head / (heads / x_heads)) * dim;
  }
};

// A block owns a head of eight rows, a warp 16 of its features.
template <int kDim>
__global__ void __launch_bounds__(kDim* kWarp / kTileOutputs)
    feature_map_kernel(FeatureMap<BFloat16, BFloat16> map) {
  constexpr int kMapWarps = kDim / kTileOutputs;
  __shared__ float logits[kTileRows][kDim + 4];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int group = static_cast<int>(threadIdx.x) % kWarp / 4;
  const int column = static_cast<int>(threadIdx.x) % 4 * 2;
  const auto head = static_cast<std::int64_t>(blockIdx.x);
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.y) * kTileRows;
  const BFloat16* weight = map.weight + (head * kDim + warp * kTileOutputs + group) * kDim;
  LaneRows<1> lane{};
  lane.in = kDim;
  lane.low = weight;
  lane.high = weight + 8 * kDim;
  lane.x[0] = row + group < map.rows ? map.from(row + group, head, kDim) : nullptr;
  float sums[1][4] = {};
  lane.add(sums, 0, 1);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    logits[column + i % 2][warp * kTileOutputs + group + i / 2 * 8] = sums[0][i];
  }
  __syncthreads();
  for (int r = warp; r < kTileRows && row + r < map.rows; r += kMapWarps) {
    write_softmax(map.to(row + r, head, kDim), logits[r], kDim);
  }
}

// Any types and widths: a block owns a head of one row.
template <class T, class Stored>
__global__ void __launch_bounds__(kBlockThreads)
    plain_feature_map_kernel(FeatureMap<T, Stored> map, int dim) {
  extern __shared__ float plain_logits[];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto head = static_cast<std::int64_t>(blockIdx.x);
  const auto row = static_cast<std::int64_t>(blockIdx.y);
  const T* x = map.from(row, head, dim);
  for (int o = warp; o < dim; o += kWarps) {
    const Stored* weight = map.weight + (head * dim + o) * dim;
    float sum = 0.0F;
    for (int i = lane; i < dim; i += kWarp) {
      sum += load_float(weight[i]) * load_float(x[i]);
    }
    sum = warp_sum(sum);
    if (lane == 0) {
      plain_logits[o] = sum;
    }
  }
  __syncthreads();
  if (warp == 0) {
    write_softmax(map.to(row, head, dim), plain_logits, dim);
  }
}

dim3 grid_of_rows(std::int64_t blocks, std::int64_t rows) {
  constexpr std::int64_t kMostRows = 65535;  // of grid.y
  BIFOCAL_REQUIRE(rows <= kMostRows,
                  "[{}] wanted at most {} groups of rows, got {}: decode fewer rows at a time",
                  kWhere,
                  kMostRows,
                  rows);
  dim3 grid = grid_of(blocks);
  grid.y = static_cast<unsigned>(rows);
  return grid;
}

template <class Out>
void launch_linear(CudaStream& stream, const DecodeLinear& op, const Bias& bias) {
  const std::int64_t rows = op.x.shape[0];
  const std::int64_t out = op.weight.shape[0];
  const bool narrow = rows <= kTileRows;
  const auto kernel = narrow ? decode_linear_kernel<1, Out> : decode_linear_kernel<2, Out>;
  const dim3 grid =
      grid_of_rows(ceil_div(out, kTileOutputs), ceil_div(rows, narrow ? kTileRows : 2 * kTileRows));
  kernel<<<grid, kBlockThreads, 0, stream.handle()>>>(op.y.as<Out>(),
                                                      op.x.as<BFloat16>(),
                                                      op.weight.as<BFloat16>(),
                                                      bias,
                                                      rows,
                                                      op.x.shape[1],
                                                      out);
  BIFOCAL_CUDA(cudaGetLastError());
}

// Calls function(In{}, Stored{}) for the types of x and weight.
template <class Function>
void dispatch_operands(const ConstTensorView& x,
                       const ConstTensorView& weight,
                       const Function& function) {
  if (x.dtype == DType::bf16) {
    require_type(kWhere, "weight", weight, DType::bf16);
    function(BFloat16{}, BFloat16{});
    return;
  }
  require_type(kWhere, "x", x, DType::f32);
  dispatch_device(kWhere, weight.dtype, [&](auto stored) { function(float{}, stored); });
}

}  // namespace

void run(CudaStream& stream, const DecodeLinear& op) {
  const std::int64_t in = op.x.shape[1];
  const std::int64_t out = op.weight.shape[0];
  if (op.y.size() == 0) {
    return;
  }
  Bias bias;
  if (op.bias && op.bias.dtype == DType::bf16) {
    bias.narrow = op.bias.as<BFloat16>();
  } else if (op.bias) {
    bias.wide = op.bias.as<float>();
  }
  dispatch_device(kWhere, op.y.dtype, [&](auto y_zero) {
    using Out = decltype(y_zero);
    if (op.x.dtype == DType::bf16 && op.weight.dtype == DType::bf16 && in % 8 == 0 &&
        is_aligned(16, op.x.data, op.weight.data)) {
      launch_linear<Out>(stream, op, bias);
      return;
    }
    dispatch_operands(op.x, op.weight, [&](auto x_zero, auto weight_zero) {
      using In = decltype(x_zero);
      using Stored = decltype(weight_zero);
      plain_linear_kernel<<<grid_of(ceil_div(out, kWarps)), kBlockThreads, 0, stream.handle()>>>(
          op.y.as<Out>(), op.x.as<In>(), op.weight.as<Stored>(), bias, op.x.shape[0], in, out);
      BIFOCAL_CUDA(cudaGetLastError());
    });
  });
}

void run(CudaStream& stream, const DecodeFeatureMap& op) {
  constexpr std::int64_t kMostDim = 8192;
  const std::int64_t rows = op.y.shape[0];
  const std::int64_t heads = op.y.shape[1];
  const std::int64_t dim = op.y.shape[2];
  BIFOCAL_REQUIRE(dim <= kMostDim,
                  "[{}] wanted heads of at most {}, got {}: set head_dim",
                  kWhere,
                  kMostDim,
                  dim);
  if (op.y.size() == 0) {
    return;
  }
  dispatch_operands(op.x, op.weight, [&](auto x_zero, auto weight_zero) {
    using T = decltype(x_zero);
    using Stored = decltype(weight_zero);
    const FeatureMap<T, Stored> map{
        op.y.as<T>(), op.x.as<T>(), op.weight.as<Stored>(), rows, heads, op.x.shape[1]};
    if constexpr (sizeof(T) == sizeof(BFloat16)) {
      if ((dim == 64 || dim == 128 || dim == 256) && is_aligned(16, op.x.data, op.weight.data)) {
        const auto kernel = dim == 64    ? feature_map_kernel<64>
                            : dim == 128 ? feature_map_kernel<128>
                                         : feature_map_kernel<256>;
        const dim3 grid = grid_of_rows(heads, ceil_div(rows, kTileRows));
        const auto threads = static_cast<int>(dim) * kWarp / kTileOutputs;
        kernel<<<grid, threads, 0, stream.handle()>>>(map);
        BIFOCAL_CUDA(cudaGetLastError());
        return;
      }
    }
    const dim3 grid = grid_of_rows(heads, rows);
    const auto width = static_cast<int>(dim);
    plain_feature_map_kernel<<<grid,
                               kBlockThreads,
                               static_cast<std::size_t>(width) * sizeof(float),
                               stream.handle()>>>(map, width);
    BIFOCAL_CUDA(cudaGetLastError());
  });
}

}  // namespace bifocal
