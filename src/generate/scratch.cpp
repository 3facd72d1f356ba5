// Buffers by use.
#include "generate/scratch.h"

#include <algorithm>

namespace bifocal {

TensorView Scratch::take(Use use, DType dtype, const Shape& shape) {
  Tensor& buffer = buffers_[use];
  if (!buffer || buffer.size() < shape.size() || buffer.dtype() != dtype) {
    const std::int64_t elements = std::max({std::int64_t{1}, shape.size(), 2 * buffer.size()});
    ++times_grown_;
    buffer = Tensor();  // given back before more is asked for
    buffer = memory_->empty(Region::activations, dtype, {elements});
  }
  return buffer.rows(0, shape.size()).reshape(shape);
}

}  // namespace bifocal
