// Gradients: whole while a unit's backward pass writes them, then summed over all ranks into parts.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "model/context.h"
#include "parallel/communicator.h"
#include "plan/parameter_table.h"

namespace bifocal {

// Parts, in the sum type, are cut as those of Weights over the same group. Summation is in rank
// order: the same bits run after run. A group of one writes its parts and has nothing to sum.
class Gradients {
 public:
  Gradients(Context context, const ParameterTable& table, Communicator& group);

  // Zeroes the parts: the start of an optimiser step.
  void clear();

  // The unit's whole gradient, flat, to be added to: of this micro-batch, zeroed when opened, or of
  // all so far in a group of one.
  TensorView open(std::int64_t unit);

  // The unit's gradient of this micro-batch is complete on this rank: starts its reduction, and
  // finishes that of the unit closed before, so that one reduction runs behind the next unit's
  // work. Collective, all ranks in the same order.
  void close(std::int64_t unit);

  // Waits for every reduction.
  void finish();

  // This rank's part of the sum over ranks and micro-batches, [part_size].
  TensorView part(std::int64_t unit) const { return parts_[static_cast<std::size_t>(unit)]; }

  // Zeroes what lies in this rank's parts of parameters that are not trained.
  void zero_untrained(const std::function<bool(const Parameter&)>& trains);

  // sums [units] f64 += sum of squares of this rank's part of every unit.
  void add_sums_of_squares(const TensorView& sums) const;

 private:
  bool is_alone() const { return group_->size() == 1; }

  Context context_;
  const ParameterTable* table_;
  Communicator* group_;
  std::vector<Tensor> parts_;
  std::map<std::int64_t, Tensor> open_;
  Tensor closing_;  // outlives closing_reduction_
  Pending closing_reduction_;
};

}  // namespace bifocal
