// What the new tensors of a student hold before training.
#include "plan/start_values.h"

#include "core/error.h"

namespace bifocal {

namespace {

// Element `index` of the whole parameter.
double start_value(const Parameter& parameter, const StartValues& values, std::int64_t index) {
  switch (parameter.start) {
    case Start::zero:
      return 0.0;
    case Start::identity: {  // [heads, d, d]
      const std::int64_t width = parameter.shape[2];
      return index / width % width == index % width ? 1.0 : 0.0;
    }
    case Start::sink:
      return values.sink;
    case Start::output_bias:
      return values.output_bias;
    case Start::forget_bias: {
      const std::int64_t steps = parameter.size() - 1;
      const double range = values.forget_bias_last - values.forget_bias_first;
      return steps == 0 ? values.forget_bias_first
                        : values.forget_bias_first +
                              range * static_cast<double>(index) / static_cast<double>(steps);
    }
    case Start::copied:
      break;
  }
  fail("[start_values] {} comes from the teacher: read it from its checkpoint", parameter.name);
}

}  // namespace

void fill_start_values(const Parameter& parameter,
                       const StartValues& values,
                       std::int64_t begin,
                       const TensorView& piece) {
  BIFOCAL_ASSERT(begin >= 0 && begin + piece.size() <= parameter.size());
  if (piece.dtype == DType::bf16) {
    auto* elements = piece.as<BFloat16>();
    for (std::int64_t i = 0; i < piece.size(); ++i) {
      elements[i] = to_bfloat16(static_cast<float>(start_value(parameter, values, begin + i)));
    }
    return;
  }
  dispatch_real("start_values", piece.dtype, [&](auto zero) {
    using T = decltype(zero);
    T* elements = piece.as<T>();
    for (std::int64_t i = 0; i < piece.size(); ++i) {
      elements[i] = static_cast<T>(start_value(parameter, values, begin + i));
    }
  });
}

}  // namespace bifocal
