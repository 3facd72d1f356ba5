// The table of measured and derived speeds.
#include "plan/gpu_speed.h"

#include <algorithm>
#include <array>

namespace bifocal {

namespace {

// Measured: docs/results/h200.json, whose rows are named. tests/plan/step_time_test.cpp holds the
// rates of single ops to that file, products from above.
constexpr GpuSpeed kH200{
    .name = "h200",
    // In a step, which heats the GPU more than one op does: what teacher_forward_packed leaves to
    // the products. Alone (linear_*) they reach 705e12.
    .products = 660e12,
    .full_attention = 643e12,     // teacher_attention
    .window_forward = 426e12,     // swa448_forward
    .window_backward = 333e12,    // swa448_forward_backward less swa448_forward
    .features_forward = 225e12,   // feature_maps
    .features_backward = 205e12,  // feature_maps_backward
    .mlstm_forward = 193e12,      // mlstm_forward
    .mlstm_backward = 144e12,     // mlstm_forward_backward less mlstm_forward
    .head = 543e12,               // kl_head
    .memory = 4.14e12,            // adamw, rms_norm, swiglu, rope, gate: 3.9e12 to 4.4e12
    .link = 2.2e11,               // docs/results/h200.md: a layer's all-gather 2.4e11, its
                                  // reduce-scatter 2.0e11
    .host = 5e10,                 // PCIe 5.0 x16 by its data sheet, less a fifth
    .source = "measured at Qwen3-4B's sizes, docs/results/h200.md",
};

// A GPU of the same or another generation, by its data sheet beside the H200's: 989 TFLOP/s of
// bfloat16 and 4.8 TB/s. Links are NVLink's; its NCCL is taken to reach the same share.
constexpr GpuSpeed scaled(std::string_view name,
                          double tflops,
                          double terabytes,
                          double link_gigabytes,
                          double host,
                          std::string_view source) {
  GpuSpeed gpu = kH200;
  gpu.name = name;
  const double flop = tflops / 989.0;
  for (double* rate : {&gpu.products,
                       &gpu.full_attention,
                       &gpu.window_forward,
                       &gpu.window_backward,
                       &gpu.features_forward,
                       &gpu.features_backward,
                       &gpu.mlstm_forward,
                       &gpu.mlstm_backward,
                       &gpu.head}) {
    *rate *= flop;
  }
  gpu.memory *= terabytes / 4.8;
  gpu.link *= link_gigabytes / 900.0;
  gpu.host = host;
  gpu.source = source;
  return gpu;
}

constexpr std::array kGpus{
    kH200,
    scaled("h100", 989.0, 3.35, 900.0, 5e10, "the H200's, scaled by data sheets; not measured"),
    scaled("a100", 312.0, 2.04, 600.0, 2.5e10, "the H200's, scaled by data sheets; not measured"),
};

}  // namespace

std::optional<GpuSpeed> gpu_speed(std::string_view name) {
  const auto* const found =
      std::ranges::find_if(kGpus, [&](const GpuSpeed& gpu) { return gpu.name == name; });
  return found == kGpus.end() ? std::nullopt : std::optional(*found);
}

std::vector<std::string_view> gpu_names() {
  std::vector<std::string_view> names;
  names.reserve(kGpus.size());
  for (const GpuSpeed& gpu : kGpus) {
    names.push_back(gpu.name);
  }
  return names;
}

}  // namespace bifocal
