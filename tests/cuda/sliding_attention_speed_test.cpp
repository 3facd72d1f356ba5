// Times of both passes at the shapes of training, with BIFOCAL_SPEED=1.
// BIFOCAL_KERNELS=portable times the kernels for every device instead of those chosen.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "core/random.h"
#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"
#include "kernels/kernel_choice.h"
#include "ops/sliding_attention.h"

namespace bifocal {
namespace {

constexpr std::int64_t kTokens = 40960;
constexpr std::int64_t kFull = kTokens;

struct Case {
  const char* name;
  std::int64_t heads, kv_heads, dim, window, document;
  bool has_sink;
};

class DeviceArray {
 public:
  explicit DeviceArray(std::size_t bytes) { BIFOCAL_CUDA(cudaMalloc(&data_, bytes)); }

  ~DeviceArray() { cudaFree(data_); }

  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// Normals, repeated: a period that shares no factor with a row makes every row another one.
void fill_normals(const DeviceArray& to, std::int64_t size) {
  constexpr std::int64_t kPeriod = 1'000'003;
  static const std::vector<BFloat16> values = [] {
    std::vector<BFloat16> all(kPeriod);
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i] = to_bfloat16(static_cast<float>(random_normal(5, 0, i)));
    }
    return all;
  }();
  for (std::int64_t at = 0; at < size; at += kPeriod) {
    BIFOCAL_CUDA(
        cudaMemcpy(static_cast<BFloat16*>(to.data()) + at,
                   values.data(),
                   static_cast<std::size_t>(std::min(kPeriod, size - at)) * sizeof(BFloat16),
                   cudaMemcpyHostToDevice));
  }
}

template <class Op>
float median_ms(CudaStream& stream, const Op& op) {
  constexpr int kWarmUps = 3;
  constexpr int kRuns = 10;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  BIFOCAL_CUDA(cudaEventCreate(&begin));
  BIFOCAL_CUDA(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kWarmUps + kRuns; ++i) {
    BIFOCAL_CUDA(cudaEventRecord(begin, stream.handle()));
    run(stream, op);
    BIFOCAL_CUDA(cudaEventRecord(end, stream.handle()));
    BIFOCAL_CUDA(cudaEventSynchronize(end));
    float ms = 0.0F;
    BIFOCAL_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i >= kWarmUps) {
      times.push_back(ms);
    }
  }
  BIFOCAL_CUDA(cudaEventDestroy(begin));
  BIFOCAL_CUDA(cudaEventDestroy(end));
  std::ranges::sort(times);
  return times[times.size() / 2];
}

std::size_t bytes_of(std::int64_t size) {
  return static_cast<std::size_t>(size) * sizeof(BFloat16);
}

// The tensors of both passes.
struct SpeedProblem {
  std::int64_t queries, keys;
  DeviceArray q, k, v, sink, out, lse, key_begin, d_out, d_q, d_k, d_v, d_sink;
  AttentionInputs inputs;
  double pairs = 0.0;  // of a query and a key that it sees, in one head
  const Case& c;

  explicit SpeedProblem(const Case& shape)
      : queries(kTokens * shape.heads * shape.dim),
        keys(kTokens * shape.kv_heads * shape.dim),
        q(bytes_of(queries)),
        k(bytes_of(keys)),
        v(bytes_of(keys)),
        sink(bytes_of(shape.heads)),
        out(bytes_of(queries)),
        lse(2 * bytes_of(kTokens * shape.heads)),
        key_begin(2 * bytes_of(kTokens)),
        d_out(bytes_of(queries)),
        d_q(bytes_of(queries)),
        d_k(bytes_of(keys)),
        d_v(bytes_of(keys)),
        d_sink(2 * bytes_of(shape.heads)),
        c(shape) {
    fill_normals(q, queries);
    fill_normals(k, keys);
    fill_normals(v, keys);
    fill_normals(sink, c.heads);
    fill_normals(d_out, queries);
    BIFOCAL_CUDA(cudaMemset(d_sink.data(), 0, 2 * bytes_of(c.heads)));
    std::vector<std::int32_t> begins(kTokens);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const std::int64_t begin = std::max(t / c.document * c.document, t - c.window + 1);
      begins[static_cast<std::size_t>(t)] = static_cast<std::int32_t>(begin);
      pairs += static_cast<double>(t - begin + 1);
    }
    BIFOCAL_CUDA(
        cudaMemcpy(key_begin.data(), begins.data(), 2 * bytes_of(kTokens), cudaMemcpyHostToDevice));
    inputs.q = of_queries(q);
    inputs.k = of_keys(k);
    inputs.v = of_keys(v);
    inputs.key_begin = TensorView{key_begin.data(), DType::i32, {kTokens}};
    if (c.has_sink) {
      inputs.sink = TensorView{sink.data(), DType::bf16, {c.heads}};
    }
  }

  TensorView of_queries(const DeviceArray& x) const {
    return {x.data(), DType::bf16, {kTokens, c.heads, c.dim}};
  }

  TensorView of_keys(const DeviceArray& x) const {
    return {x.data(), DType::bf16, {kTokens, c.kv_heads, c.dim}};
  }

  TensorView statistics() const { return {lse.data(), DType::f32, {kTokens, c.heads}}; }

  SlidingAttentionForward forward() const { return {of_queries(out), statistics(), inputs}; }

  SlidingAttentionBackward backward() const {
    SlidingAttentionBackward op{.d_q = of_queries(d_q),
                                .d_k = of_keys(d_k),
                                .d_v = of_keys(d_v),
                                .d_sink = {},
                                .d_pinned_k = {},
                                .d_pinned_v = {},
                                .d_out = of_queries(d_out),
                                .out = of_queries(out),
                                .lse = statistics(),
                                .inputs = inputs};
    if (c.has_sink) {
      op.d_sink = TensorView{d_sink.data(), DType::f32, {c.heads}};
    }
    return op;
  }

  // Of a pass with this many products of a query and a key a pair.
  void report(double ms, double products) const {
    const double flop = 2.0 * products * static_cast<double>(c.dim * c.heads) * pairs;
    std::printf("%-44s %9.3f ms %7.1f TFLOP/s\n", c.name, ms, flop / ms * 1e-9);
    std::fflush(stdout);
    EXPECT_GT(ms, 0.0);
  }
};

void choose_kernels() {
  const char* kernels = std::getenv("BIFOCAL_KERNELS");
  if (kernels != nullptr && std::string_view(kernels) == "portable") {
    set_kernel_choice(KernelChoice::portable);
  }
}

TEST(HopperSlidingAttention, SpeedOfTheForwardPass) {
  if (std::getenv("BIFOCAL_SPEED") == nullptr) {
    GTEST_SKIP() << "set BIFOCAL_SPEED=1 to measure";
  }
  choose_kernels();
  CudaStream stream;
  for (const Case& c : {
           Case{"teacher, one document, 32/8 heads of 128", 32, 8, 128, kFull, kTokens, false},
           Case{"teacher, documents of 4096", 32, 8, 128, kFull, 4096, false},
           Case{"window 448 and sink", 32, 8, 128, 448, kTokens, true},
           Case{"window 448 and sink, documents of 4096", 32, 8, 128, 448, 4096, true},
           Case{"window 448", 32, 8, 128, 448, kTokens, false},
           Case{"window 576", 32, 8, 128, 576, kTokens, false},
           Case{"window 64", 32, 8, 128, 64, kTokens, false},
           Case{"teacher, 16/4 heads of 256", 16, 4, 256, kFull, kTokens, false},
           Case{"window 448 and sink, 16/4 heads of 256", 16, 4, 256, 448, kTokens, true},
           Case{"teacher, 32/8 heads of 64", 32, 8, 64, kFull, kTokens, false},
           Case{"window 448 and sink, 32/8 heads of 64", 32, 8, 64, 448, kTokens, true},
       }) {
    const SpeedProblem problem(c);
    const SlidingAttentionForward op = problem.forward();
    op.check();
    problem.report(median_ms(stream, op), 2.0);
  }
  set_kernel_choice(KernelChoice::automatic);
}

// TFLOP/s are of the five products that the pass needs; the kernels make seven. The sink's gradient
// alone is the time of the first pass over d_out and out.
TEST(HopperSlidingAttention, SpeedOfTheBackwardPass) {
  if (std::getenv("BIFOCAL_SPEED") == nullptr) {
    GTEST_SKIP() << "set BIFOCAL_SPEED=1 to measure";
  }
  choose_kernels();
  CudaStream stream;
  for (const Case& c : {
           Case{"window 448 and sink", 32, 8, 128, 448, kTokens, true},
           Case{"window 448 and sink, documents of 4096", 32, 8, 128, 448, 4096, true},
           Case{"window 448", 32, 8, 128, 448, kTokens, false},
           Case{"window 576", 32, 8, 128, 576, kTokens, false},
           Case{"window 64", 32, 8, 128, 64, kTokens, false},
           Case{"full, documents of 4096", 32, 8, 128, kFull, 4096, false},
           Case{"window 448 and sink, 16/4 heads of 256", 16, 4, 256, 448, kTokens, true},
           Case{"window 448 and sink, 32/8 heads of 64", 32, 8, 64, 448, kTokens, true},
       }) {
    const SpeedProblem problem(c);
    problem.forward().check();
    run(stream, problem.forward());
    SlidingAttentionBackward op = problem.backward();
    op.check();
    problem.report(median_ms(stream, op), 5.0);
    if (c.has_sink) {
      op.d_q = op.d_k = op.d_v = {};
      op.check();
      std::printf("%-44s %9.3f ms\n", "  of it, sums of d_out . out", median_ms(stream, op));
    }
  }
  set_kernel_choice(KernelChoice::automatic);
}

}  // namespace
}  // namespace bifocal
