// Sliding attention: choice of kernels, d_out . out, and the sink's gradient.
// key_begin, pinned_begin and pinned_end are trusted. Head widths to 512; on tensor cores bfloat16
// ones of 64, 128 and 256, of tensors on multiples of 16 bytes.
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/error.h"
#include "kernels/device_scratch.h"
#include "kernels/kernel_choice.h"
#include "kernels/launch.cuh"
#include "kernels/sliding_attention.cuh"
#include "kernels/tensor_core.cuh"

namespace bifocal {

namespace {

constexpr const char* kWhere = "sliding_attention";
constexpr int kThreads = 256;
constexpr int kRowLanes = 8;      // threads of one row of d_out
constexpr int kMostGroup = 128;   // query heads of a key-value head that Hopper's tiles hold
constexpr int kSinkTokens = 128;  // tokens of one partial sum of the sink's gradient

// delta = d_out . out, row by row.
template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    delta_kernel(float* delta, const T* d_out, const T* out, std::int64_t rows, int dim) {
  const std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / kRowLanes) + threadIdx.x / kRowLanes;
  const int lane = static_cast<int>(threadIdx.x % kRowLanes);
  float sum = 0.0F;
  if (row < rows) {
    for (int i = lane; i < dim / N; i += kRowLanes) {
      const auto a = load_vector<N>(d_out + row * dim, i);
      const auto b = load_vector<N>(out + row * dim, i);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        sum += load_float(a.element[j]) * load_float(b.element[j]);
      }
    }
  }
  sum = warp_sum<kRowLanes>(sum);
  if (row < rows && lane == 0) {
    delta[row] = sum;
  }
}

// partial [blocks, heads]: sums of exp(sink - lse) delta over kSinkTokens tokens, in their order.
template <class T>
__global__ void __launch_bounds__(kThreads) sink_partial_kernel(
    float* partial, const T* sink, const float* lse, const float* delta, int tokens, int heads) {
  const int begin = static_cast<int>(blockIdx.x) * kSinkTokens;
  const int end = min(begin + kSinkTokens, tokens);
  for (int head = static_cast<int>(threadIdx.x); head < heads; head += kThreads) {
    const float own = load_float(sink[head]);
    float sum = 0.0F;
    for (int token = begin; token < end; ++token) {
      const std::int64_t at = static_cast<std::int64_t>(token) * heads + head;
      sum += expf(own - lse[at]) * delta[at];
    }
    partial[static_cast<std::int64_t>(blockIdx.x) * heads + head] = sum;
  }
}

__global__ void __launch_bounds__(kThreads)
    sink_total_kernel(float* d_sink, const float* partial, int blocks, int heads) {
  const int head = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (head >= heads) {
    return;
  }
  float sum = 0.0F;
  for (int block = 0; block < blocks; ++block) {
    sum += partial[static_cast<std::int64_t>(block) * heads + head];
  }
  d_sink[head] -= sum;
}

template <class T>
void make_delta(
    CudaStream& stream, const AttentionArgs<T>& a, const T* d_out, const T* out, float* delta) {
  constexpr int kGroup = kVectorSize<T>;
  const std::int64_t rows = static_cast<std::int64_t>(a.tokens) * a.heads;
  const dim3 grid = grid_of(ceil_div(rows, kThreads / kRowLanes));
  if (a.dim % kGroup == 0 && is_aligned(16, d_out, out)) {
    launch_kernel(
        stream, grid, kThreads, 0, delta_kernel<T, kGroup>, delta, d_out, out, rows, a.dim);
  } else {
    launch_kernel(stream, grid, kThreads, 0, delta_kernel<T, 1>, delta, d_out, out, rows, a.dim);
  }
}

template <class T>
void add_sink_gradient(CudaStream& stream,
                       const AttentionArgs<T>& a,
                       const float* lse,
                       const float* delta,
                       float* d_sink) {
  const std::int64_t blocks = ceil_div(a.tokens, kSinkTokens);
  DeviceScratch scratch(stream);
  auto* partial = scratch.take<float>(blocks * a.heads);
  launch_kernel(stream,
                grid_of(blocks),
                kThreads,
                0,
                sink_partial_kernel<T>,
                partial,
                a.sink,
                lse,
                delta,
                a.tokens,
                a.heads);
  launch_kernel(stream,
                grid_of(ceil_div(a.heads, kThreads)),
                kThreads,
                0,
                sink_total_kernel,
                d_sink,
                partial,
                static_cast<int>(blocks),
                a.heads);
}

// Whether tiles serve this head width and these tensors, whose rows move in 16-byte chunks.
template <class T, class... Tensors>
bool has_tiles(const AttentionArgs<T>& a, const Tensors*... others) {
  return std::is_same_v<T, BFloat16> && (a.dim == 64 || a.dim == 128 || a.dim == 256) &&
         is_aligned(16, a.q, a.k, a.v, a.pinned_k, a.pinned_v, others...);
}

template <class T>
void attend(CudaStream& stream, const SlidingAttentionForward& op) {
  const AttentionArgs<T> args(op.inputs);
  T* out = op.out.as<T>();
  auto* lse = op.lse.as<float>();
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (has_tiles(args, out)) {
      use_hopper_kernels() && args.group <= kMostGroup ? attend_hopper(stream, args, out, lse)
                                                       : attend_tiles(stream, args, out, lse);
      return;
    }
  }
  attend_plain(stream, args, out, lse);
}

template <class T>
AttentionGradients<T> gradients_of(const SlidingAttentionBackward& op) {
  const auto data = [](const TensorView& x) { return x ? x.as<T>() : nullptr; };
  return {.d_q = data(op.d_q),
          .d_k = data(op.d_k),
          .d_v = data(op.d_v),
          .d_pinned_k = op.inputs.pinned_k ? data(op.d_pinned_k) : nullptr,
          .d_pinned_v = op.inputs.pinned_k ? data(op.d_pinned_v) : nullptr,
          .d_out = op.d_out.as<T>(),
          .lse = op.lse.as<float>(),
          .delta = nullptr};
}

template <class T>
bool has_tiles(const AttentionArgs<T>& a, const AttentionGradients<T>& g) {
  return has_tiles(a, g.d_out, g.d_q, g.d_k, g.d_v, g.d_pinned_k, g.d_pinned_v);
}

template <class T>
void differentiate(CudaStream& stream, const SlidingAttentionBackward& op) {
  const AttentionArgs<T> args(op.inputs);
  AttentionGradients<T> gradients = gradients_of<T>(op);
  const T* out = op.out.as<T>();
  float* d_sink = args.sink == nullptr ? nullptr : op.d_sink.as<float>();
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (has_tiles(args, gradients) && is_aligned(16, out) && use_hopper_kernels() &&
        has_hopper_backward(args)) {
      differentiate_hopper(stream, args, gradients, out, d_sink);
      return;
    }
  }
  DeviceScratch scratch(stream);
  auto* delta = scratch.take<float>(static_cast<std::int64_t>(args.tokens) * args.heads);
  if (args.tokens > 0) {
    make_delta(stream, args, gradients.d_out, out, delta);
    if (args.sink != nullptr) {
      add_sink_gradient(stream, args, gradients.lse, delta, d_sink);
    }
  }
  if (!op.d_q && !op.d_k && !op.d_pinned_k) {
    return;
  }
  gradients.delta = delta;
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (has_tiles(args, gradients)) {
      differentiate_query_tiles(stream, args, gradients);
      differentiate_key_tiles(stream, args, gradients);
      return;
    }
  }
  differentiate_plain(stream, args, gradients);
}

}  // namespace

template <class T>
AttentionArgs<T>::AttentionArgs(const AttentionInputs& in)
    : tokens(static_cast<int>(in.q.shape[0])),
      keys(static_cast<int>(in.k.shape[0])),
      heads(static_cast<int>(in.q.shape[1])),
      kv_heads(static_cast<int>(in.k.shape[1])),
      group(heads / kv_heads),
      dim(static_cast<int>(in.q.shape[2])),
      pinned(in.pinned_k ? static_cast<int>(in.pinned_k.shape[0]) : 0),
      scale(1.0F / std::sqrt(static_cast<float>(dim))),
      q(in.q.as<T>()),
      k(in.k.as<T>()),
      v(in.v.as<T>()),
      sink(in.sink ? in.sink.as<T>() : nullptr),
      pinned_k(in.pinned_k ? in.pinned_k.as<T>() : nullptr),
      pinned_v(in.pinned_k ? in.pinned_v.as<T>() : nullptr),
      key_begin(in.key_begin.as<std::int32_t>()),
      pinned_begin(in.pinned_k ? in.pinned_begin.as<std::int32_t>() : nullptr),
      pinned_end(in.pinned_k ? in.pinned_end.as<std::int32_t>() : nullptr) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 2;
  BIFOCAL_REQUIRE(in.k.shape[0] * group <= kMost,
                  "[{}] wanted at most {} keys times query heads of one key-value head, got {}: "
                  "cut the row",
                  kWhere,
                  kMost,
                  in.k.shape[0] * group);
}

void run(CudaStream& stream, const SlidingAttentionForward& op) {
  dispatch_device(kWhere, op.out.dtype, [&](auto zero) { attend<decltype(zero)>(stream, op); });
}

void run(CudaStream& stream, const SlidingAttentionBackward& op) {
  dispatch_device(
      kWhere, op.d_out.dtype, [&](auto zero) { differentiate<decltype(zero)>(stream, op); });
}

}  // namespace bifocal
