// Reduction of gradients behind the backward pass.
#include "model/gradients.h"

#include "ops/elementwise.h"
#include "ops/reduce.h"

namespace bifocal {

Gradients::Gradients(Context context, const ParameterTable& table, Communicator& group)
    : context_(context), group_(&group) {
  for (const Unit& unit : table.units()) {
    parts_.push_back(context_.memory.zeros(
        Region::gradients, context_.dtype, {part_size(unit.size, group.size())}));
  }
}

void Gradients::clear() {
  for (const Tensor& part : parts_) {
    run(context_.stream, Zero{.x = part});
  }
}

TensorView Gradients::open(std::int64_t unit) {
  Tensor& whole = open_[unit];
  if (!whole) {
    const std::int64_t size = parts_[static_cast<std::size_t>(unit)].size() * group_->size();
    whole = context_.memory.zeros(Region::gradients, context_.dtype, {size});
  }
  return whole;
}

void Gradients::close(std::int64_t unit) {
  const auto found = open_.find(unit);
  BIFOCAL_ASSERT(found != open_.end());
  finish();
  closing_ = std::move(found->second);
  open_.erase(found);
  closing_reduction_ = group_->start_reduce_scatter(part(unit), closing_);
}

void Gradients::finish() {
  closing_reduction_.wait();
  closing_reduction_ = Pending();
  closing_ = Tensor();
}

std::vector<double> Gradients::sums_of_squares() {
  std::vector<double> sums(parts_.size(), 0.0);
  for (std::size_t unit = 0; unit < parts_.size(); ++unit) {
    run(context_.stream, SumOfSquares{.sum = {&sums[unit], DType::f64, {1}}, .x = parts_[unit]});
  }
  group_->all_reduce_sum({sums.data(), DType::f64, {static_cast<std::int64_t>(sums.size())}});
  return sums;
}

}  // namespace bifocal
