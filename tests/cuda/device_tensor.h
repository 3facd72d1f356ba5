// Tensors on the device for tests: guarded, at any alignment, filled from and read to the host.
#pragma once

#include <cstdint>
#include <vector>

#include <cuda_runtime.h>

#include "core/memory.h"
#include "core/tensor.h"
#include "kernels/cuda_stream.h"

namespace bifocal::test {

// Owns device memory for one tensor between two guards. Its first element lies `shift` elements
// past a multiple of 256 bytes, as a view into a larger tensor would.
class DeviceTensor {
 public:
  DeviceTensor(DType dtype, const Shape& shape, int shift);
  ~DeviceTensor();
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;
  DeviceTensor(DeviceTensor&& other) noexcept;
  DeviceTensor& operator=(DeviceTensor&&) = delete;

  const TensorView& view() const { return view_; }

  // values: of this tensor's type, or float64 that are rounded to it.
  void upload(const ConstTensorView& values);
  // The elements as float64; a failed expectation when a guard was written over.
  std::vector<double> download(CudaStream& stream) const;

 private:
  std::size_t total_bytes() const;
  void upload_bytes(const void* from);

  std::byte* base_ = nullptr;
  TensorView view_;
};

// Rounds to float32 or bfloat16.
double rounded(DType dtype, double value);

// A float64 tensor of normals that `stored` holds exactly.
Tensor stored_normals(
    Memory& memory, DType stored, const Shape& shape, std::uint64_t seed, double deviation = 1.0);

// A device tensor of type `stored` with these float64 values.
DeviceTensor on_device(const ConstTensorView& values, DType stored, int shift);

// A device tensor of these numbers as they are: flags, ids, float64.
template <class T>
DeviceTensor numbers_on_device(const std::vector<T>& values, const Shape& shape) {
  DeviceTensor tensor(kDTypeOf<T>, shape, 0);
  tensor.upload({values.data(), kDTypeOf<T>, shape});
  return tensor;
}

template <class T>
DeviceTensor numbers_on_device(const std::vector<T>& values) {
  return numbers_on_device(values, {static_cast<std::int64_t>(values.size())});
}

// Unit roundoff of float32.
inline constexpr double kRoundoff = 5.9604644775390625e-8;

// The tolerance rule, element by element: the float32 arithmetic may be off by roundoffs *
// kRoundoff * magnitude. For bfloat16 comes twice the error of rounding the exact result, which
// is what one rounding at the store costs when float32 errors push it over a midpoint.
void expect_close(const std::vector<double>& got,
                  const ConstTensorView& want,
                  DType stored,
                  double roundoffs,
                  const std::vector<double>& magnitude);

// The same with |want| as magnitude.
void expect_close(const std::vector<double>& got,
                  const ConstTensorView& want,
                  DType stored,
                  double roundoffs);

// float32 and bfloat16, aligned and not.
struct DeviceCase {
  DType stored;
  int shift;
};

std::vector<DeviceCase> device_cases();

}  // namespace bifocal::test
