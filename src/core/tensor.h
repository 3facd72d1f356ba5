// Views of contiguous row-major tensors. A view owns nothing and computes nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/dtype.h"

namespace bifocal {

// Up to four dimensions, outermost first.
class Shape {
 public:
  static constexpr int kMaxRank = 4;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims);

  int rank() const { return rank_; }

  std::int64_t operator[](int dim) const { return dims_.at(static_cast<std::size_t>(dim)); }

  // Number of elements; 1 for rank 0.
  std::int64_t size() const;

  void append(std::int64_t dim);

  bool operator==(const Shape&) const = default;

 private:
  std::array<std::int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

// "[3, 4]"
std::string to_string(const Shape& shape);

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  Shape shape{0};

  // False for an argument that was left out. A tensor of no elements may be either.
  explicit operator bool() const { return data != nullptr; }

  std::int64_t size() const { return shape.size(); }

  std::size_t bytes() const { return static_cast<std::size_t>(size()) * size_of(dtype); }

  // Elements of one index of the outermost dimension.
  std::int64_t row_size() const { return shape[0] == 0 ? 0 : size() / shape[0]; }

  // The elements as T; throws when the tensor holds another type.
  template <class T>
  T* as() const;

  // Outermost indices [begin, end).
  TensorView rows(std::int64_t begin, std::int64_t end) const;

  // The same elements under another shape of equal size.
  TensorView reshape(const Shape& other) const;
};

struct ConstTensorView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  Shape shape{0};

  ConstTensorView() = default;

  ConstTensorView(const void* data, DType dtype, const Shape& shape)
      : data(data), dtype(dtype), shape(shape) {}

  ConstTensorView(const TensorView& other)  // NOLINT(google-explicit-constructor): adds const
      : data(other.data), dtype(other.dtype), shape(other.shape) {}

  explicit operator bool() const { return data != nullptr; }

  std::int64_t size() const { return shape.size(); }

  std::size_t bytes() const { return static_cast<std::size_t>(size()) * size_of(dtype); }

  std::int64_t row_size() const { return shape[0] == 0 ? 0 : size() / shape[0]; }

  template <class T>
  const T* as() const;

  ConstTensorView rows(std::int64_t begin, std::int64_t end) const;

  ConstTensorView reshape(const Shape& other) const;
};

// Throws "[where] name: wanted float32 [3, 4], got ..." unless the tensor has this type and shape.
void require_tensor(const char* where,
                    const char* name,
                    const ConstTensorView& tensor,
                    DType dtype,
                    const Shape& shape);

// Throws where as<T>() finds another type.
[[noreturn]] void fail_dtype(DType wanted, DType got);

template <class T>
T* TensorView::as() const {
  if (dtype != kDTypeOf<T>) {
    fail_dtype(kDTypeOf<T>, dtype);
  }
  return static_cast<T*>(data);
}

template <class T>
const T* ConstTensorView::as() const {
  if (dtype != kDTypeOf<T>) {
    fail_dtype(kDTypeOf<T>, dtype);
  }
  return static_cast<const T*>(data);
}

}  // namespace bifocal
