// Reduction of gradients behind the backward pass.
#include "model/gradients.h"

#include "model/weights.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"

namespace bifocal {

Gradients::Gradients(Context context, const ParameterTable& table, Communicator& group)
    : context_(context), table_(&table), group_(&group) {
  for (const Unit& unit : table.units()) {
    parts_.push_back(context_.memory.zeros(
        Region::gradients, context_.sum_type(), {part_size(unit.size, group.size())}));
  }
}

void Gradients::clear() {
  for (const Tensor& part : parts_) {
    run(context_.stream, Zero{.x = part});
  }
}

TensorView Gradients::open(std::int64_t unit) {
  if (is_alone()) {
    return part(unit);
  }
  Tensor& whole = open_[unit];
  if (!whole) {
    const std::int64_t size = parts_[static_cast<std::size_t>(unit)].size() * group_->size();
    whole = context_.memory.zeros(Region::gradients, context_.sum_type(), {size});
  }
  return whole;
}

void Gradients::close(std::int64_t unit) {
  if (is_alone()) {
    return;
  }
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

void Gradients::zero_untrained(const std::function<bool(const Parameter&)>& trains) {
  for (std::size_t unit = 0; unit < parts_.size(); ++unit) {
    const TensorView own = parts_[unit];
    const std::int64_t begin = own.size() * group_->rank();
    std::int64_t first = 0;  // of the range that is not trained, padding included
    const auto zero_until = [&](std::int64_t end) {
      if (first < end) {
        run(context_.stream, Zero{.x = own.rows(first, end)});
      }
    };
    for (const ParameterPiece& piece :
         pieces_in(*table_, static_cast<std::int64_t>(unit), begin, begin + own.size())) {
      if (trains(*piece.parameter)) {
        zero_until(piece.offset);
        first = piece.offset + piece.count;
      }
    }
    zero_until(own.size());
  }
}

void Gradients::add_sums_of_squares(const TensorView& sums) const {
  for (std::size_t unit = 0; unit < parts_.size(); ++unit) {
    const auto index = static_cast<std::int64_t>(unit);
    run(context_.stream, SumOfSquares{.sum = sums.rows(index, index + 1), .x = parts_[unit]});
  }
}

}  // namespace bifocal
