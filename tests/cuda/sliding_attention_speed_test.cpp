// Times of the forward pass at the shapes of training, with BIFOCAL_SPEED=1.
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

float median_ms(CudaStream& stream, const SlidingAttentionForward& op) {
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

void time_case(CudaStream& stream, const Case& c) {
  const std::int64_t queries = kTokens * c.heads * c.dim;
  const std::int64_t keys = kTokens * c.kv_heads * c.dim;
  const auto bytes = [](std::int64_t size) { return static_cast<std::size_t>(size) * 2; };
  const DeviceArray q(bytes(queries));
  const DeviceArray k(bytes(keys));
  const DeviceArray v(bytes(keys));
  const DeviceArray sink(bytes(c.heads));
  const DeviceArray out(bytes(queries));
  const DeviceArray lse(2 * bytes(kTokens * c.heads));
  const DeviceArray key_begin(2 * bytes(kTokens));
  fill_normals(q, queries);
  fill_normals(k, keys);
  fill_normals(v, keys);
  fill_normals(sink, c.heads);
  std::vector<std::int32_t> begins(kTokens);
  double pairs = 0.0;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    const std::int64_t begin = std::max(t / c.document * c.document, t - c.window + 1);
    begins[static_cast<std::size_t>(t)] = static_cast<std::int32_t>(begin);
    pairs += static_cast<double>(t - begin + 1);
  }
  BIFOCAL_CUDA(
      cudaMemcpy(key_begin.data(), begins.data(), 2 * bytes(kTokens), cudaMemcpyHostToDevice));
  AttentionInputs inputs{
      .q = TensorView{q.data(), DType::bf16, {kTokens, c.heads, c.dim}},
      .k = TensorView{k.data(), DType::bf16, {kTokens, c.kv_heads, c.dim}},
      .v = TensorView{v.data(), DType::bf16, {kTokens, c.kv_heads, c.dim}},
      .key_begin = TensorView{key_begin.data(), DType::i32, {kTokens}},
      .sink = {},
      .pinned_k = {},
      .pinned_v = {},
      .pinned_begin = {},
      .pinned_end = {},
  };
  if (c.has_sink) {
    inputs.sink = TensorView{sink.data(), DType::bf16, {c.heads}};
  }
  const SlidingAttentionForward op{
      .out = TensorView{out.data(), DType::bf16, {kTokens, c.heads, c.dim}},
      .lse = TensorView{lse.data(), DType::f32, {kTokens, c.heads}},
      .inputs = inputs};
  op.check();
  const double ms = median_ms(stream, op);
  const double flop = 4.0 * static_cast<double>(c.dim * c.heads) * pairs;
  std::printf("%-44s %9.3f ms %7.1f TFLOP/s\n", c.name, ms, flop / ms * 1e-9);
  std::fflush(stdout);
  EXPECT_GT(ms, 0.0);
}

TEST(HopperSlidingAttention, SpeedOfTheForwardPass) {
  if (std::getenv("BIFOCAL_SPEED") == nullptr) {
    GTEST_SKIP() << "set BIFOCAL_SPEED=1 to measure";
  }
  const char* kernels = std::getenv("BIFOCAL_KERNELS");
  if (kernels != nullptr && std::string_view(kernels) == "portable") {
    set_kernel_choice(KernelChoice::portable);
  }
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
    time_case(stream, c);
  }
  set_kernel_choice(KernelChoice::automatic);
}

}  // namespace
}  // namespace bifocal
