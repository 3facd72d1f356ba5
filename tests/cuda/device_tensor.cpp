// Device memory of the CUDA tests and their tolerance rule.
#include "cuda/device_tensor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/random.h"
#include "kernels/cuda_check.h"

namespace bifocal::test {

namespace {

constexpr std::size_t kGuardBytes = 256;
constexpr int kGuardValue = 0xa5;

template <class T>
T read(const std::byte* from) {
  T value{};
  std::memcpy(&value, from, sizeof(value));
  return value;
}

double element(DType type, const std::byte* from) {
  switch (type) {
    case DType::f64:
      return read<double>(from);
    case DType::f32:
      return read<float>(from);
    case DType::bf16:
      return to_float(read<BFloat16>(from));
    case DType::f16:
      return to_float(read<Float16>(from));
    case DType::i64:
      return static_cast<double>(read<std::int64_t>(from));
    case DType::i32:
      return read<std::int32_t>(from);
    case DType::u8:
      return read<std::uint8_t>(from);
  }
  return 0.0;
}

}  // namespace

DeviceTensor::DeviceTensor(DType dtype, const Shape& shape, int shift) {
  view_.dtype = dtype;
  view_.shape = shape;
  const std::size_t shift_bytes = static_cast<std::size_t>(shift) * size_of(dtype);
  void* memory = nullptr;
  BIFOCAL_CUDA(cudaMalloc(&memory, total_bytes()));
  base_ = static_cast<std::byte*>(memory);
  BIFOCAL_CUDA(cudaMemset(base_, kGuardValue, total_bytes()));
  BIFOCAL_CUDA(cudaDeviceSynchronize());  // ops' streams do not wait for it by themselves
  view_.data = base_ + kGuardBytes + shift_bytes;
}

DeviceTensor::~DeviceTensor() {
  cudaFree(base_);
}

DeviceTensor::DeviceTensor(DeviceTensor&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), view_(other.view_) {}

// The shift is below one guard, so that two guards and a half hold it.
std::size_t DeviceTensor::total_bytes() const {
  return 3 * kGuardBytes + view_.bytes();
}

void DeviceTensor::upload(const ConstTensorView& values) {
  if (values.dtype == view_.dtype) {
    upload_bytes(values.data);
    return;
  }
  const auto* from = values.as<double>();
  std::vector<std::byte> host(view_.bytes());
  for (std::int64_t i = 0; i < view_.size(); ++i) {
    const auto value = static_cast<float>(from[i]);
    std::byte* to = host.data() + static_cast<std::size_t>(i) * size_of(view_.dtype);
    if (view_.dtype == DType::bf16) {
      const BFloat16 half = to_bfloat16(value);
      std::memcpy(to, &half, sizeof(half));
    } else {
      std::memcpy(to, &value, sizeof(value));
    }
  }
  upload_bytes(host.data());
}

void DeviceTensor::upload_bytes(const void* from) {
  BIFOCAL_CUDA(cudaMemcpy(view_.data, from, view_.bytes(), cudaMemcpyHostToDevice));
  BIFOCAL_CUDA(cudaDeviceSynchronize());  // ops' streams do not wait for the stream of such copies
}

std::vector<double> DeviceTensor::download(CudaStream& stream) const {
  stream.synchronize();
  std::vector<std::byte> host(total_bytes());
  BIFOCAL_CUDA(cudaMemcpy(host.data(), base_, host.size(), cudaMemcpyDeviceToHost));
  const auto begin = static_cast<std::size_t>(static_cast<std::byte*>(view_.data) - base_);
  const std::size_t end = begin + view_.bytes();
  for (std::size_t i = 0; i < host.size(); ++i) {
    if (i < begin || i >= end) {
      EXPECT_EQ(host[i], static_cast<std::byte>(kGuardValue)) << "guard byte " << i << " written";
    }
  }
  std::vector<double> values(static_cast<std::size_t>(view_.size()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = element(view_.dtype, host.data() + begin + i * size_of(view_.dtype));
  }
  return values;
}

double rounded(DType dtype, double value) {
  const auto single = static_cast<float>(value);
  return dtype == DType::bf16 ? to_float(to_bfloat16(single)) : single;
}

Tensor stored_normals(
    Memory& memory, DType stored, const Shape& shape, std::uint64_t seed, double deviation) {
  Tensor x = memory.empty(Region::activations, DType::f64, shape);
  for (std::int64_t i = 0; i < x.size(); ++i) {
    const double value = deviation * random_normal(seed, 0, static_cast<std::uint64_t>(i));
    x.as<double>()[i] = rounded(stored, value);
  }
  return x;
}

DeviceTensor on_device(const ConstTensorView& values, DType stored, int shift) {
  DeviceTensor tensor(stored, values.shape, shift);
  tensor.upload(values);
  return tensor;
}

void expect_close(const std::vector<double>& got,
                  const ConstTensorView& want,
                  DType stored,
                  double roundoffs,
                  const std::vector<double>& magnitude) {
  ASSERT_EQ(got.size(), static_cast<std::size_t>(want.size()));
  const auto* truth = want.as<double>();
  double worst = 0.0;
  std::size_t where = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    // Below 3e-39 a factor may have underflowed whole, and others made that error larger again.
    double bound = roundoffs * kRoundoff * magnitude[i] + 1e-37;
    if (stored == DType::bf16) {
      bound = 2.0 * (std::abs(rounded(stored, truth[i]) - truth[i]) + bound);
    }
    const double part = std::abs(got[i] - truth[i]) / bound;
    if (!(part <= worst)) {
      worst = part;
      where = i;
    }
  }
  EXPECT_LE(worst, 1.0) << fmt::format("{} element {} of {}: got {:.9g}, want {:.9g}",
                                       name_of(stored),
                                       where,
                                       got.size(),
                                       got[where],
                                       truth[where]);
}

void expect_close(const std::vector<double>& got,
                  const ConstTensorView& want,
                  DType stored,
                  double roundoffs) {
  std::vector<double> magnitude(got.size());
  std::transform(
      want.as<double>(), want.as<double>() + want.size(), magnitude.begin(), [](double x) {
        return std::abs(x);
      });
  expect_close(got, want, stored, roundoffs, magnitude);
}

std::vector<DeviceCase> device_cases() {
  return {{DType::f32, 0}, {DType::f32, 1}, {DType::bf16, 0}, {DType::bf16, 3}};
}

}  // namespace bifocal::test
