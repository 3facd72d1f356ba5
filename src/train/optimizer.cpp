// Clipping and AdamW over sharded parts.
#include "train/optimizer.h"

#include <cmath>

#include "ops/adamw.h"
#include "ops/elementwise.h"

namespace bifocal {

Optimizer::Optimizer(Context context, Weights& weights, const RunConfig::Optimizer& settings)
    : context_(context), weights_(&weights), settings_(settings) {
  for (std::size_t unit = 0; unit < weights.table().units().size(); ++unit) {
    const TensorView part = weights.part(static_cast<std::int64_t>(unit));
    first_.push_back(context_.memory.zeros(Region::optimizer, part.dtype, part.shape));
    second_.push_back(context_.memory.zeros(Region::optimizer, part.dtype, part.shape));
  }
}

void Optimizer::reset() {
  for (const std::vector<Tensor>* moments : {&first_, &second_}) {
    for (const Tensor& moment : *moments) {
      run(context_.stream, Zero{.x = moment});
    }
  }
}

// Gradients of frozen parameters must not count in any norm.
void Optimizer::zero_untrained(const Step& step, Gradients& gradients) const {
  for (std::size_t unit = 0; unit < first_.size(); ++unit) {
    const TensorView part = gradients.part(static_cast<std::int64_t>(unit));
    const std::int64_t begin = part.size() * weights_->group().rank();
    for (const ParameterPiece& piece : pieces_in(
             weights_->table(), static_cast<std::int64_t>(unit), begin, begin + part.size())) {
      if (step.trains(*piece.parameter)) {
        continue;
      }
      run(context_.stream, Zero{.x = part.rows(piece.offset, piece.offset + piece.count)});
    }
  }
}

double Optimizer::update(const Step& step, Gradients& gradients) {
  zero_untrained(step, gradients);
  const std::vector<double> squares = gradients.sums_of_squares();
  double total = 0.0;
  for (std::size_t unit = 0; unit < squares.size(); ++unit) {
    total += squares[unit] * step.unit_factors[unit] * step.unit_factors[unit];
  }
  const double norm = std::sqrt(total);
  BIFOCAL_REQUIRE(
      std::isfinite(norm),
      "[train] the gradient's norm is {}: wanted a finite one. Lower the rate, or look at the "
      "data of this step; the last checkpoint is intact",
      norm);
  const auto clip_factor = [&](double of_norm) {
    if (step.clip == 0.0) {
      return 1.0;
    }
    return std::min(1.0, step.clip / (of_norm + 1e-6));
  };
  for (std::size_t unit = 0; unit < squares.size(); ++unit) {
    const double unit_norm = std::sqrt(squares[unit]) * step.unit_factors[unit];
    const double factor = step.unit_factors[unit] *
                          clip_factor(step.clip_scope == ClipScope::each_unit ? unit_norm : norm);
    const auto index = static_cast<std::int64_t>(unit);
    const TensorView part = weights_->part(index);
    const std::int64_t begin = part.size() * weights_->group().rank();
    for (const ParameterPiece& piece :
         pieces_in(weights_->table(), index, begin, begin + part.size())) {
      if (!step.trains(*piece.parameter)) {
        continue;
      }
      const auto range = [&](const TensorView& whole) {
        return whole.rows(piece.offset, piece.offset + piece.count);
      };
      run(context_.stream,
          AdamW{.parameter = range(part),
                .first = range(first_[unit]),
                .second = range(second_[unit]),
                .gradient = range(gradients.part(index)),
                .rate = step.rate(*piece.parameter),
                .beta1 = settings_.beta1,
                .beta2 = settings_.beta2,
                .eps = settings_.eps,
                .decay = step.decays(*piece.parameter) ? settings_.decay : 0.0,
                .grad_scale = factor,
                .step = step.number});
    }
  }
  weights_->share();
  return norm;
}

std::vector<ShardedTensor> Optimizer::checkpoint_tensors() const {
  std::vector<ShardedTensor> tensors;
  for (std::size_t unit = 0; unit < first_.size(); ++unit) {
    const TensorView part = weights_->part(static_cast<std::int64_t>(unit));
    const std::int64_t begin = part.size() * weights_->group().rank();
    for (const ParameterPiece& piece : pieces_in(
             weights_->table(), static_cast<std::int64_t>(unit), begin, begin + part.size())) {
      const auto add = [&](const std::string& prefix, const TensorView& whole) {
        tensors.push_back({.name = prefix + piece.parameter->name,
                           .global = piece.parameter->shape,
                           .begin = piece.first,
                           .end = piece.first + piece.count,
                           .data = whole.rows(piece.offset, piece.offset + piece.count)});
      };
      add("", part);
      add("optimizer.first.", first_[unit]);
      add("optimizer.second.", second_[unit]);
    }
  }
  return tensors;
}

}  // namespace bifocal
