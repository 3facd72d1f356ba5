// What the new tensors of a student hold before training.
#pragma once

#include <cstdint>

#include "core/tensor.h"
#include "plan/parameter_table.h"

namespace bifocal {

// Configurable ones; features start as the identity, gate weights at 0.
struct StartValues {
  double sink = 0.0;
  double forget_bias_first = 3.0;  // f_gate bias of the first state
  double forget_bias_last = 9.0;   // and of the last; even steps between, the first where S = 1
  double output_bias = -1.0;       // o_gate bias
};

// Fills `piece` (float32 or float64, any shape) with the flat elements [begin, begin +
// piece.size()) of a new parameter. Throws Error for a copied one.
void fill_start_values(const Parameter& parameter,
                       const StartValues& values,
                       std::int64_t begin,
                       const TensorView& piece);

}  // namespace bifocal
