// A training stage: what it computes in a step, what it trains and how its gradients are clipped.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "data/row.h"
#include "distill/teacher.h"
#include "model/decoder.h"
#include "parallel/mesh.h"

namespace bifocal {

// The rows of a stage: step s consumes positions [first + s * per_step, + per_step) of the data.
struct StageRows {
  std::function<Row(std::int64_t position)> row;
  std::int64_t first = 0;
  std::int64_t per_step = 1;
  std::int64_t steps = 0;

  // The index-th row of group `group` of `groups`, which share every step's rows evenly, in the
  // group's order.
  Row of_group(std::int64_t index, std::int64_t group, std::int64_t groups) const {
    const std::int64_t each = per_step / groups;
    return row(first + index / each * per_step + group * each + index % each);
  }
};

// What a step found. Everything is already summed over all ranks.
struct StepResult {
  double loss = 0.0;
  double kl = 0.0;  // mean per counted token; 0 where the stage has none
  double ce = 0.0;
  double kept = 0.0;                 // tokens that counted
  std::vector<double> layer_losses;  // stage 1: missed share of the teacher's attention, by layer
  std::vector<double> unit_factors;  // what turns each unit's summed gradient into that of its loss
  std::vector<double> unit_squares;  // sum of squares of each unit's summed gradient
};

enum class ClipScope : std::uint8_t {
  all_parameters,  // one norm
  each_unit        // every layer by its own norm
};

class Stage {
 public:
  Stage(Context context, const Mesh& mesh, const ParameterTable& table)
      : context_(context), mesh_(&mesh), table_(&table) {}

  virtual ~Stage() = default;
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

  // Adds the gradients of step `step` (counted inside the stage) to cleared gradients, finishes
  // their reduction and zeroes those of parameters that the stage does not train. Waits for the
  // device once, at the end. Collective.
  StepResult run_step(std::int64_t step, Gradients& gradients);

  virtual bool trains(const Parameter& parameter) const = 0;

  virtual ClipScope clip_scope() const = 0;

 protected:
  // Sums that a step leaves on the device.
  virtual std::int64_t sum_count() const = 0;

  // Queues the step: gradients, and what it adds to sums [sum_count()] f64.
  virtual void queue_step(std::int64_t step, Gradients& gradients, const TensorView& sums) = 0;

  // What the step queued last found; sums are over all ranks. unit_squares is left out.
  virtual StepResult result(const std::vector<double>& sums) const = 0;

  Context context() const { return context_; }

  const Mesh& mesh() const { return *mesh_; }

 private:
  Context context_;
  const Mesh* mesh_;
  const ParameterTable* table_;
};

}  // namespace bifocal
