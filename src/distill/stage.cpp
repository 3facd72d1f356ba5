// What all stages do around their step.
#include "distill/stage.h"

#include "ops/transfer.h"

namespace bifocal {

StepResult Stage::run_step(std::int64_t step, Gradients& gradients) {
  const std::int64_t own = sum_count();
  const std::int64_t all = own + static_cast<std::int64_t>(table_->units().size());
  const Tensor sums = context_.memory.zeros(Region::loss, DType::f64, {all});
  queue_step(step, gradients, sums.rows(0, own));
  phase(context_, "gradients");
  gradients.finish();
  gradients.zero_untrained([this](const Parameter& parameter) { return trains(parameter); });
  gradients.add_sums_of_squares(sums.rows(own, all));
  std::vector<double> values(static_cast<std::size_t>(all));
  const TensorView host{values.data(), DType::f64, {all}};
  run(context_.stream, Download{.y = host, .x = sums});
  mesh_->world().all_reduce_sum(host);
  StepResult found = result({values.begin(), values.begin() + own});
  found.unit_squares.assign(values.begin() + own, values.end());
  return found;
}

}  // namespace bifocal
