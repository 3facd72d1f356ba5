// Shapes and slices.
#include "core/tensor.h"

namespace bifocal {

namespace {

template <class View>
View slice(const View& view, std::int64_t begin, std::int64_t end) {
  BIFOCAL_ASSERT(view.shape.rank() > 0 && 0 <= begin && begin <= end && end <= view.shape[0]);
  Shape shape{end - begin};
  for (int dim = 1; dim < view.shape.rank(); ++dim) {
    shape.append(view.shape[dim]);
  }
  View part = view;
  part.shape = shape;
  const std::size_t offset =
      static_cast<std::size_t>(begin * view.row_size()) * size_of(view.dtype);
  using Byte = std::conditional_t<std::is_same_v<View, TensorView>, char, const char>;
  if (view.data != nullptr) {
    part.data = static_cast<Byte*>(view.data) + offset;
  }
  return part;
}

}  // namespace

Shape::Shape(std::initializer_list<std::int64_t> dims) {
  for (const std::int64_t dim : dims) {
    append(dim);
  }
}

void Shape::append(std::int64_t dim) {
  BIFOCAL_ASSERT(rank_ < kMaxRank && dim >= 0);
  dims_.at(static_cast<std::size_t>(rank_++)) = dim;
}

std::int64_t Shape::size() const {
  std::int64_t product = 1;
  for (int dim = 0; dim < rank_; ++dim) {
    product *= dims_.at(static_cast<std::size_t>(dim));
  }
  return product;
}

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (int dim = 0; dim < shape.rank(); ++dim) {
    if (dim > 0) {
      text += ", ";
    }
    text += std::to_string(shape[dim]);
  }
  return text + "]";
}

TensorView TensorView::rows(std::int64_t begin, std::int64_t end) const {
  return slice(*this, begin, end);
}

ConstTensorView ConstTensorView::rows(std::int64_t begin, std::int64_t end) const {
  return slice(*this, begin, end);
}

TensorView TensorView::reshape(const Shape& other) const {
  BIFOCAL_ASSERT(other.size() == size());
  return {data, dtype, other};
}

ConstTensorView ConstTensorView::reshape(const Shape& other) const {
  BIFOCAL_ASSERT(other.size() == size());
  return {data, dtype, other};
}

void require_tensor(const char* where,
                    const char* name,
                    const ConstTensorView& tensor,
                    DType dtype,
                    const Shape& shape) {
  BIFOCAL_REQUIRE(tensor.dtype == dtype && tensor.shape == shape &&
                      (tensor.data != nullptr || shape.size() == 0),
                  "[{}] {}: wanted {} {}, got {} {}{}: pass a tensor of that type and shape",
                  where,
                  name,
                  name_of(dtype),
                  to_string(shape),
                  name_of(tensor.dtype),
                  to_string(tensor.shape),
                  tensor.data == nullptr ? " without data" : "");
}

void fail_dtype(DType wanted, DType got) {
  fail("[tensor] wanted {} elements, got {}: convert the tensor first",
       name_of(wanted),
       name_of(got));
}

}  // namespace bifocal
