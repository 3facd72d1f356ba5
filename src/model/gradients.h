// Gradients: whole while a unit's backward pass writes them, then summed over all ranks into parts.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "model/context.h"
#include "parallel/communicator.h"
#include "plan/parameter_table.h"

namespace bifocal {

// Parts are cut as those of Weights over the same group. Summation is in rank order: the same bits
// run after run.
class Gradients {
 public:
  Gradients(Context context, const ParameterTable& table, Communicator& group);

  // Zeroes the parts: the start of an optimiser step.
  void clear();

  // The unit's whole gradient for this micro-batch, flat, zeroed when opened, to be added to.
  TensorView open(std::int64_t unit);

  // The unit's gradient of this micro-batch is complete on this rank: starts its reduction, and
  // finishes that of the unit closed before, so that one reduction runs behind the next unit's
  // work. Collective, all ranks in the same order.
  void close(std::int64_t unit);

  // Waits for every reduction.
  void finish();

  // This rank's part of the sum over ranks and micro-batches, [part_size].
  TensorView part(std::int64_t unit) const { return parts_[static_cast<std::size_t>(unit)]; }

  // Sum of squares of every unit's gradient over all ranks, [units], in double. Collective.
  std::vector<double> sums_of_squares();

 private:
  Context context_;
  Communicator* group_;
  std::vector<Tensor> parts_;
  std::map<std::int64_t, Tensor> open_;
  Tensor closing_;  // outlives closing_reduction_
  Pending closing_reduction_;
};

}  // namespace bifocal
