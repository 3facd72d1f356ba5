// Products of a few rows: weights are read once, at the speed of memory. A block's threads take 16
// bytes of several weight rows each before they need any of them, the first of them before the
// kernel before has ended. Sums go over lanes and warps in an order that neither the number of rows
// nor that of outputs changes.
#include <algorithm>
#include <type_traits>

#include "kernels/decode_products.cuh"
#include "kernels/dependent.cuh"
#include "kernels/launch.cuh"
#include "kernels/warp.cuh"
#include "ops/decode_layer.h"

namespace bifocal {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocksOfProcessor = 6;
constexpr int kAhead = 8;  // 16-byte loads of a thread under way
constexpr int kLongRow = 4096;
constexpr int kStaticBytes = 1024;  // most shared memory beside the staged rows

// What a task's weights and sums belong to: kOut outputs, or gate and up of one.
template <class T, class W, int kOut, bool kGated>
struct Task {
  const W* weight[kOut];

  __device__ Task(const ProductArgs<T, W>& a, int task) {
    if constexpr (kGated) {
      weight[0] = a.gate + static_cast<std::int64_t>(task) * a.in;
      weight[1] = a.up + static_cast<std::int64_t>(task) * a.in;
    } else {
#pragma unroll
      for (int o = 0; o < kOut; ++o) {
        const int output = min(task * kOut + o, a.outputs - 1);
        weight[o] = nullptr;
        for (int p = 0; p < a.parts; ++p) {
          const int local = output - a.part[p].begin;
          if (local >= 0 && local < a.part[p].out) {
            weight[o] = a.part[p].weight + static_cast<std::int64_t>(local) * a.in;
          }
        }
      }
    }
  }
};

template <class T, class W>
__device__ void store_output(const ProductArgs<T, W>& a, int output, int row, float sum) {
  if (output >= a.outputs) {
    return;
  }
  for (int p = 0; p < a.parts; ++p) {
    const ProductPart<T, W>& part = a.part[p];
    const int local = output - part.begin;
    if (local < 0 || local >= part.out) {
      continue;
    }
    const std::int64_t at = static_cast<std::int64_t>(row) * part.out + local;
    sum += part.bias == nullptr ? 0.0F : load_float(part.bias[local]);
    if (part.is_wide) {
      sum += part.add == nullptr ? 0.0F : static_cast<const float*>(part.add)[at];
      static_cast<float*>(part.y)[at] = sum;
    } else {
      sum += part.add == nullptr ? 0.0F : load_float(static_cast<const T*>(part.add)[at]);
      static_cast<T*>(part.y)[at] = store_as<T>(sum);
    }
  }
}

// 16 bytes at a time where rows allow it.
template <class T, bool kPacked>
__device__ void stage_copy(T* to, const T* from, int in) {
  if constexpr (kPacked) {
    for (int i = static_cast<int>(threadIdx.x); i < in / kVectorSize<T>; i += kThreads) {
      store_packed(to, i, load_packed(from, i));
    }
  } else {
    for (int i = static_cast<int>(threadIdx.x); i < in; i += kThreads) {
      to[i] = from[i];
    }
  }
}

// A staged row through its norm. Each thread reads what it wrote itself, but for the sums.
template <class T, bool kPacked>
__device__ void norm_row(T* row, const T* norm, int in, float eps) {
  __shared__ float partial[kWarps];
  constexpr int kWide = kPacked ? kVectorSize<T> : 1;
  float squares = 0.0F;
  for (int i = static_cast<int>(threadIdx.x); i < in / kWide; i += kThreads) {
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      const float x = load_float(row[i * kWide + j]);
      squares += x * x;
    }
  }
  squares = warp_sum(squares);
  __syncthreads();  // the row before has read its sums
  if (lane_id() == 0) {
    partial[warp_id()] = squares;
  }
  __syncthreads();
  squares = 0.0F;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    squares += partial[warp];
  }
  const float inverse_rms = rsqrtf(squares / static_cast<float>(in) + eps);
  for (int i = static_cast<int>(threadIdx.x); i < in / kWide; i += kThreads) {
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      const int at = i * kWide + j;
      row[at] = store_as<T>(load_float(row[at]) * inverse_rms * load_float(norm[at]));
    }
  }
}

// N weights of a row against N inputs.
template <class T, class W, int N>
__device__ float partial_dot(const Vector<W, N>& weights, const T* x, float sum) {
  const auto inputs = load_vector<N>(x, 0);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    sum = fmaf(load_float(weights.element[i]), load_float(inputs.element[i]), sum);
  }
  return sum;
}

// 16 bytes as they lie in memory, see Packed.
template <class T, class W>
__device__ float packed_dot(const Packed<W>& weights, const T* x, float sum) {
  constexpr int kInputs = kVectorSize<T> < Packed<W>::kSize ? kVectorSize<T> : Packed<W>::kSize;
#pragma unroll
  for (int part = 0; part < Packed<W>::kSize / kInputs; ++part) {
    const auto inputs = load_packed(x + part * kInputs, 0);
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
      sum = fmaf(weights[part * kInputs + i], inputs[i], sum);
    }
  }
  return sum;
}

// A task is a warp's where rows are short, a block's where they are long (kSplit): then each warp
// takes every fourth piece of a row. kRows rows of x. kPacked: rows are multiples of 16 bytes.
template <class T, class W, int kOut, int kRows, bool kSplit, bool kGated, bool kPacked>
__global__ void __launch_bounds__(kThreads, kRows == 1 ? kBlocksOfProcessor : 4)
    product_kernel(const __grid_constant__ ProductArgs<T, W> a) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ float sums_of_warps[kWarps][kOut][kRows];
  T* staged = reinterpret_cast<T*>(memory);
  constexpr int kWide = kPacked ? Packed<W>::kSize : 1;
  constexpr int kUnroll = kAhead / kOut;
  using Piece = std::conditional_t<kPacked, Packed<W>, Vector<W, 1>>;
  const int warp = warp_id();
  const int lane = lane_id();
  const int first_piece = kSplit ? static_cast<int>(threadIdx.x) : lane;
  constexpr int kStep = kSplit ? kThreads : kWarp;
  const int pieces = a.in / kWide;
  const int task_step = static_cast<int>(gridDim.x) * (kSplit ? 1 : kWarps);
  int task = kSplit ? static_cast<int>(blockIdx.x) : static_cast<int>(blockIdx.x) * kWarps + warp;
  Piece piece[kOut][kUnroll];
  const auto load = [&](const Task<T, W, kOut, kGated>& of, int begin) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = begin + u * kStep;
#pragma unroll
      for (int o = 0; o < kOut; ++o) {
        piece[o][u] = at < pieces ? reinterpret_cast<const Piece*>(of.weight[o])[at] : Piece{};
      }
    }
  };
  if (task < a.tasks) {
    load(Task<T, W, kOut, kGated>(a, task), first_piece);
  }
  T* norm = staged + kRows * a.in;
  if (a.norm != nullptr) {
    stage_copy<T, kPacked>(norm, a.norm, a.in);
  }
  let_kernel_after_start();
  wait_for_kernel_before();
  for (int row = 0; row < a.rows; ++row) {
    stage_copy<T, kPacked>(staged + row * a.in, a.x + static_cast<std::int64_t>(row) * a.in, a.in);
    if (a.norm != nullptr) {
      norm_row<T, kPacked>(staged + row * a.in, norm, a.in, a.eps);
    }
  }
  for (int i = a.rows * a.in + static_cast<int>(threadIdx.x); i < kRows * a.in; i += kThreads) {
    staged[i] = store_as<T>(0.0F);
  }
  __syncthreads();
  bool is_loaded = true;
  for (; task < a.tasks; task += task_step) {
    const Task<T, W, kOut, kGated> of(a, task);
    float sums[kOut][kRows] = {};
    for (int begin = first_piece; begin < pieces; begin += kUnroll * kStep) {
      if (!is_loaded) {
        load(of, begin);
      }
      is_loaded = false;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = begin + u * kStep;
        if (at < pieces) {
#pragma unroll
          for (int row = 0; row < kRows; ++row) {
            const T* x = staged + row * a.in + at * kWide;
#pragma unroll
            for (int o = 0; o < kOut; ++o) {
              if constexpr (kPacked) {
                sums[o][row] = packed_dot(piece[o][u], x, sums[o][row]);
              } else {
                sums[o][row] = partial_dot<T, W, 1>(piece[o][u], x, sums[o][row]);
              }
            }
          }
        }
      }
    }
    is_loaded = false;
#pragma unroll
    for (int o = 0; o < kOut; ++o) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        sums[o][row] = warp_sum(sums[o][row]);
        if (lane == 0) {
          sums_of_warps[warp][o][row] = sums[o][row];
        }
      }
    }
    if constexpr (kSplit) {
      __syncthreads();
    } else {
      __syncwarp();
    }
    constexpr int kStored = kGated ? 1 : kOut;
    const int index = kSplit ? static_cast<int>(threadIdx.x) : lane;
    if (index < kStored * kRows && index % kRows < a.rows) {
      const int o = index / kRows;
      const int row = index % kRows;
      const auto total = [&](int of_output) {
        float sum = sums_of_warps[kSplit ? 0 : warp][of_output][row];
        if constexpr (kSplit) {
          for (int w = 1; w < kWarps; ++w) {
            sum += sums_of_warps[w][of_output][row];
          }
        }
        return sum;
      };
      if constexpr (kGated) {
        const float gate = total(0);
        a.gated[static_cast<std::int64_t>(row) * a.outputs + task] =
            store_as<T>(gate / (1.0F + expf(-gate)) * total(1));
      } else {
        store_output(a, task * kOut + o, row, total(o));
      }
    }
    if constexpr (kSplit) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }
}

// Rows of shared memory: those of x, and the norm's weight.
template <int kRows>
int staged_rows(bool has_norm) {
  return kRows + (has_norm ? 1 : 0);
}

template <class T, class W, int kOut, int kRows, bool kSplit, bool kGated, bool kPacked>
void launch_products(CudaStream& stream, ProductArgs<T, W> a) {
  a.tasks = kGated ? a.outputs : static_cast<int>(ceil_div(a.outputs, kOut));
  const std::int64_t blocks = kSplit ? a.tasks : ceil_div(a.tasks, kWarps);
  // As many tasks for every block as there are, all blocks at work at once.
  const std::int64_t at_once =
      static_cast<std::int64_t>(device_traits(stream).multiprocessors) * kBlocksOfProcessor;
  const std::int64_t turns = std::max<std::int64_t>(1, ceil_div(blocks, at_once));
  launch_dependent(stream,
                   dim3(static_cast<unsigned>(std::max<std::int64_t>(1, ceil_div(blocks, turns)))),
                   kThreads,
                   staged_rows<kRows>(a.norm != nullptr) * a.in * static_cast<int>(sizeof(T)),
                   product_kernel<T, W, kOut, kRows, kSplit, kGated, kPacked>,
                   a);
}

template <class T, class W, int kRows, bool kGated>
void choose_products(CudaStream& stream, const ProductArgs<T, W>& a, bool packed) {
  if (!packed) {
    launch_products<T, W, 2, kRows, false, kGated, false>(stream, a);
    return;
  }
  if constexpr (!kGated) {
    if (a.in >= kLongRow) {
      launch_products<T, W, 4, kRows, true, false, true>(stream, a);
      return;
    }
  }
  launch_products<T, W, 2, kRows, false, kGated, true>(stream, a);
}

// Rows of x that fit a block's shared memory go together, at most four.
template <class T, class W, bool kGated, class OfRows>
void product_rows(
    CudaStream& stream, std::int64_t rows, std::int64_t in, bool packed, const OfRows& of_rows) {
  constexpr std::int64_t kTogether = 4;
  const std::int64_t fit =
      (most_shared_bytes() - kStaticBytes) / (in * static_cast<std::int64_t>(sizeof(T)));
  BIFOCAL_REQUIRE(fit > 1,
                  "[decode_products] wanted rows of at most {} KiB, got {} numbers",
                  most_shared_bytes() / 2048,
                  in);
  if constexpr (std::is_same_v<T, BFloat16> && std::is_same_v<W, BFloat16>) {
    const std::int64_t together = packed ? hopper_product_rows(in) : 0;
    if (together > 0) {
      for (std::int64_t first = 0; first < rows; first += together) {
        hopper_products(stream, of_rows(first, std::min(together, rows - first)), kGated);
      }
      return;
    }
  }
  for (std::int64_t first = 0; first < rows;) {
    const bool many = rows - first > 1 && fit > kTogether;
    const std::int64_t count = many ? std::min(kTogether, rows - first) : 1;
    const ProductArgs<T, W> args = of_rows(first, count);
    if (many) {
      choose_products<T, W, kTogether, kGated>(stream, args, packed);
    } else {
      choose_products<T, W, 1, kGated>(stream, args, packed);
    }
    first += count;
  }
}

// Calls function(T{}, W{}).
template <class Function>
void dispatch_weights(const char* where, DType type, DType stored, const Function& function) {
  dispatch_device(where, type, [&](auto zero) {
    if (stored == DType::bf16) {
      function(zero, BFloat16{});
    } else {
      function(zero, zero);
    }
  });
}

}  // namespace

void run(CudaStream& stream, const DecodeProducts& op) {
  const std::int64_t in = op.x.shape[1];
  if (op.products.empty() || op.x.shape[0] == 0) {
    return;
  }
  const DType stored = op.products.front().weight.dtype;
  dispatch_weights("decode_products", op.x.dtype, stored, [&](auto zero, auto weight_zero) {
    using T = decltype(zero);
    using W = decltype(weight_zero);
    bool packed = in % Packed<W>::kSize == 0 && is_aligned(16, op.x.as<T>()) &&
                  (!op.norm || is_aligned(16, op.norm.as<T>()));
    for (const DecodeProduct& product : op.products) {
      require_type("decode_products", "weight", product.weight, stored);
      packed = packed && is_aligned(16, product.weight.as<W>());
    }
    const auto of_rows = [&](std::int64_t first, std::int64_t count) {
      ProductArgs<T, W> a{};
      a.x = op.x.as<T>() + first * in;
      a.norm = op.norm ? op.norm.as<T>() : nullptr;
      a.rows = static_cast<int>(count);
      a.in = static_cast<int>(in);
      a.eps = static_cast<float>(op.eps);
      for (const DecodeProduct& product : op.products) {
        const std::int64_t out = product.weight.shape[0];
        const auto skipped = static_cast<std::size_t>(first * out) * size_of(product.y.dtype);
        ProductPart<T, W>& part = a.part[a.parts++];
        part.y = static_cast<std::byte*>(product.y.data) + skipped;
        part.weight = product.weight.as<W>();
        part.bias = product.bias ? product.bias.as<T>() : nullptr;
        part.add =
            product.add ? static_cast<const std::byte*>(product.add.data) + skipped : nullptr;
        part.begin = a.outputs;
        part.out = static_cast<int>(out);
        part.is_wide = product.y.dtype == DType::f32;
        a.outputs += part.out;
      }
      return a;
    };
    product_rows<T, W, false>(stream, op.x.shape[0], in, packed, of_rows);
  });
}

void run(CudaStream& stream, const DecodeGatedProduct& op) {
  const std::int64_t in = op.x.shape[1];
  const std::int64_t out = op.gate.shape[0];
  dispatch_weights(
      "decode_gated_product", op.x.dtype, op.gate.dtype, [&](auto zero, auto weight_zero) {
        using T = decltype(zero);
        using W = decltype(weight_zero);
        const bool packed = in % Packed<W>::kSize == 0 &&
                            is_aligned(16, op.gate.as<W>(), op.up.as<W>()) &&
                            is_aligned(16, op.x.as<T>(), op.norm.as<T>());
        const auto of_rows = [&](std::int64_t first, std::int64_t count) {
          ProductArgs<T, W> a{};
          a.x = op.x.as<T>() + first * in;
          a.norm = op.norm.as<T>();
          a.gate = op.gate.as<W>();
          a.up = op.up.as<W>();
          a.gated = op.y.as<T>() + first * out;
          a.rows = static_cast<int>(count);
          a.in = static_cast<int>(in);
          a.outputs = static_cast<int>(out);
          a.eps = static_cast<float>(op.eps);
          return a;
        };
        product_rows<T, W, true>(stream, op.x.shape[0], in, packed, of_rows);
      });
}

}  // namespace bifocal
