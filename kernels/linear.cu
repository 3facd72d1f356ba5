// Matrix products of whole rows through cuBLASLt; biases and their gradients.
#include <algorithm>

#include "kernels/cublas_lt.h"
#include "kernels/cuda_stream.h"
#include "kernels/device_scratch.h"
#include "kernels/launch.cuh"
#include "ops/linear.h"

namespace bifocal {
namespace {

constexpr const char* kWhere = "linear";

// y[row] = bias, for the products that the library cannot add a bias to.
template <class Out, class In>
__global__ void __launch_bounds__(kBlockThreads)
    repeat_bias_kernel(Out* y, const In* bias, std::int64_t size, std::int64_t columns) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kBlockThreads;
  std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  for (; i < size; i += step) {
    y[i] = store_as<Out>(load_float(bias[i % columns]));
  }
}

void repeat_bias(CudaStream& stream, const TensorView& y, const ConstTensorView& bias) {
  constexpr std::int64_t kMostBlocks = 4096;
  const dim3 grid = grid_of(std::min(kMostBlocks, ceil_div(y.size(), kBlockThreads)));
  dispatch_device(kWhere, y.dtype, [&](auto out) {
    dispatch_device(kWhere, bias.dtype, [&](auto in) {
      using Out = decltype(out);
      using In = decltype(in);
      repeat_bias_kernel<<<grid, kBlockThreads, 0, stream.handle()>>>(
          y.as<Out>(), bias.as<In>(), y.size(), y.shape[1]);
    });
  });
  BIFOCAL_CUDA(cudaGetLastError());
}

// Column sums in two stages. A block owns kSumColumns columns of a span of rows; its kSumLanes
// threads of a column take every kSumLanes-th row.
constexpr int kSumColumns = 32;
constexpr int kSumLanes = kBlockThreads / kSumColumns;
constexpr std::int64_t kSumRows = 512;

template <class T>
__global__ void __launch_bounds__(kBlockThreads)
    sum_span_kernel(double* partial, const T* x, std::int64_t rows, std::int64_t columns) {
  __shared__ float sums[kSumLanes][kSumColumns];
  const int lane = static_cast<int>(threadIdx.x) / kSumColumns;
  const int place = static_cast<int>(threadIdx.x) % kSumColumns;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * kSumColumns + place;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kSumRows;
  const std::int64_t end = min(begin + kSumRows, rows);
  float sum = 0.0F;
  if (column < columns) {
#pragma unroll 4
    for (std::int64_t row = begin + lane; row < end; row += kSumLanes) {
      sum += load_float(x[row * columns + column]);
    }
  }
  sums[lane][place] = sum;
  __syncthreads();
  if (lane == 0 && column < columns) {
    double total = 0.0;
    for (int i = 0; i < kSumLanes; ++i) {
      total += static_cast<double>(sums[i][place]);
    }
    partial[blockIdx.x * columns + column] = total;
  }
}

__global__ void __launch_bounds__(kBlockThreads)
    add_spans_kernel(float* to, const double* partial, std::int64_t spans, std::int64_t columns) {
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  if (column < columns) {
    double total = 0.0;
    for (std::int64_t span = 0; span < spans; ++span) {
      total += partial[span * columns + column];
    }
    to[column] += static_cast<float>(total);
  }
}

void add_column_sums(CudaStream& stream, const TensorView& to, const ConstTensorView& x) {
  const std::int64_t rows = x.shape[0];
  const std::int64_t columns = x.shape[1];
  const std::int64_t spans = ceil_div(rows, kSumRows);
  DeviceScratch scratch(stream);
  auto* partial = scratch.take<double>(spans * columns);
  dim3 grid = grid_of(spans);
  grid.y = grid_of(ceil_div(columns, kSumColumns)).x;
  dispatch_device(kWhere, x.dtype, [&](auto zero) {
    using T = decltype(zero);
    sum_span_kernel<<<grid, kBlockThreads, 0, stream.handle()>>>(partial, x.as<T>(), rows, columns);
  });
  BIFOCAL_CUDA(cudaGetLastError());
  add_spans_kernel<<<grid_of(ceil_div(columns, kBlockThreads)),
                     kBlockThreads,
                     0,
                     stream.handle()>>>(to.as<float>(), partial, spans, columns);
  BIFOCAL_CUDA(cudaGetLastError());
}

void multiply(CudaStream& stream, const MatrixProduct& product) {
  const bool queued = stream.blas().multiply(stream.handle(), product);
  BIFOCAL_ASSERT(queued);
}

void require_device_type(DType type) {
  dispatch_device(kWhere, type, [](auto) {});
}

}  // namespace

// Row-major tensors are column-major ones transposed: y^T [out, rows] = weight x^T.
void run(CudaStream& stream, const LinearForward& op) {
  require_device_type(op.x.dtype);
  require_device_type(op.y.dtype);
  const std::int64_t in = op.x.shape[1];
  if (op.y.size() == 0) {
    return;
  }
  if (in == 0) {
    if (op.bias) {
      repeat_bias(stream, op.y, op.bias);
    } else {
      BIFOCAL_CUDA(cudaMemsetAsync(op.y.data, 0, op.y.bytes(), stream.handle()));
    }
    return;
  }
  MatrixProduct product{.d = op.y.data,
                        .a = op.weight.data,
                        .b = op.x.data,
                        .m = op.y.shape[1],
                        .n = op.y.shape[0],
                        .k = in,
                        .a_transposed = true,
                        .input = op.x.dtype,
                        .output = op.y.dtype};
  if (op.bias && op.bias.dtype == op.y.dtype && is_aligned(16, op.bias.data)) {
    product.bias = op.bias.data;
    if (stream.blas().multiply(stream.handle(), product)) {
      return;
    }
    product.bias = nullptr;
  }
  if (op.bias) {
    repeat_bias(stream, op.y, op.bias);
    product.adds = true;
  }
  multiply(stream, product);
}

// d_x^T [in, rows] = weight^T d_y^T.
void run(CudaStream& stream, const LinearBackwardInput& op) {
  require_device_type(op.d_x.dtype);
  const std::int64_t out = op.weight.shape[0];
  if (op.d_x.size() == 0) {
    return;
  }
  if (out == 0) {
    if (!op.accumulate) {
      BIFOCAL_CUDA(cudaMemsetAsync(op.d_x.data, 0, op.d_x.bytes(), stream.handle()));
    }
    return;
  }
  const MatrixProduct product{.d = op.d_x.data,
                              .a = op.weight.data,
                              .b = op.d_y.data,
                              .m = op.d_x.shape[1],
                              .n = op.d_x.shape[0],
                              .k = out,
                              .adds = op.accumulate,
                              .input = op.d_y.dtype,
                              .output = op.d_x.dtype};
  multiply(stream, product);
}

// d_weight^T [in, out] += x^T d_y.
void run(CudaStream& stream, const LinearBackwardWeight& op) {
  require_device_type(op.x.dtype);
  require_type(kWhere, "d_weight", op.d_weight, DType::f32);
  const std::int64_t rows = op.x.shape[0];
  if (rows == 0) {
    return;
  }
  if (op.d_weight.size() > 0) {
    const MatrixProduct product{.d = op.d_weight.data,
                                .a = op.x.data,
                                .b = op.d_y.data,
                                .m = op.d_weight.shape[1],
                                .n = op.d_weight.shape[0],
                                .k = rows,
                                .b_transposed = true,
                                .adds = true,
                                .input = op.x.dtype,
                                .output = op.d_weight.dtype};
    multiply(stream, product);
  }
  if (op.d_bias && op.d_bias.size() > 0) {
    require_type(kWhere, "d_bias", op.d_bias, DType::f32);
    add_column_sums(stream, op.d_bias, op.d_y);
  }
}

}  // namespace bifocal
