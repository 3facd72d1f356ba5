// Clipping and AdamW over sharded parts.
#include "train/optimizer.h"

#include <cmath>

#include "ops/adamw.h"
#include "ops/elementwise.h"
#include "train/sharded_tensors.h"

namespace bifocal {

double gradient_norm(const std::vector<double>& unit_squares,
                     const std::vector<double>& unit_factors) {
  double total = 0.0;
  for (std::size_t unit = 0; unit < unit_squares.size(); ++unit) {
    total += unit_squares[unit] * unit_factors[unit] * unit_factors[unit];
  }
  return std::sqrt(total);
}

Optimizer::Optimizer(Context context,
                     Weights& weights,
                     const RunConfig::Optimizer& settings,
                     Memory* host_memory)
    : context_(context), weights_(&weights), settings_(settings), host_memory_(host_memory) {
  Memory& memory =
      settings.moments == "host" && host_memory != nullptr ? *host_memory : context_.memory;
  for (const TensorView& master : weights.masters()) {
    const DType type = settings.moments == "bfloat16" ? DType::bf16 : master.dtype;
    for (std::vector<Tensor>* moments : {&first_, &second_}) {
      moments->push_back(memory.empty(Region::optimizer, type, master.shape));
    }
  }
  reset();
}

void Optimizer::reset() {
  for (const std::vector<Tensor>* moments : {&first_, &second_}) {
    for (const Tensor& moment : *moments) {
      run(context_.stream, Zero{.x = moment});
    }
  }
}

std::vector<Optimizer::Range> Optimizer::ranges_of(const Step& step, std::int64_t unit) const {
  const std::int64_t size = weights_->master(unit).size();
  const std::int64_t begin = size * weights_->group().rank();
  std::vector<Range> ranges;
  bool continues = false;
  for (const ParameterPiece& piece : pieces_in(weights_->table(), unit, begin, begin + size)) {
    if (!step.trains(*piece.parameter)) {
      continues = false;
      continue;
    }
    const std::int64_t end = piece.offset + piece.count;
    const double rate = step.rate(*piece.parameter);
    const double decay = step.decays(*piece.parameter) ? settings_.decay : 0.0;
    if (continues && ranges.back().rate == rate && ranges.back().decay == decay) {
      ranges.back().end = end;  // padding is zero and stays so
    } else {
      ranges.push_back({.begin = piece.offset, .end = end, .rate = rate, .decay = decay});
    }
    continues = true;
  }
  return ranges;
}

void Optimizer::update_unit(const Step& step,
                            std::int64_t unit,
                            const TensorView& gradient,
                            double factor) const {
  for (const Range& range : ranges_of(step, unit)) {
    const auto part = [&](const TensorView& whole) { return whole.rows(range.begin, range.end); };
    const auto index = static_cast<std::size_t>(unit);
    AdamW op{.parameter = part(weights_->master(unit)),
             .first = part(first_[index]),
             .second = part(second_[index]),
             .gradient = part(gradient),
             .rate = range.rate,
             .beta1 = settings_.beta1,
             .beta2 = settings_.beta2,
             .eps = settings_.eps,
             .decay = range.decay,
             .grad_scale = factor,
             .step = step.number};
    if (weights_->has_masters()) {
      op.copy = part(weights_->part(unit));
    }
    run(context_.stream, op);
  }
}

double Optimizer::update(const Step& step, const Gradients& gradients) {
  const std::vector<double>& squares = step.unit_squares;
  BIFOCAL_ASSERT(squares.size() == first_.size() && step.unit_factors.size() == first_.size());
  const double norm = gradient_norm(squares, step.unit_factors);
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
    update_unit(step, index, gradients.part(index), factor);
  }
  weights_->share();
  return norm;
}

std::vector<TensorView> Optimizer::state() const {
  std::vector<TensorView> tensors = weights_->masters();
  for (const std::vector<Tensor>* moments : {&first_, &second_}) {
    tensors.insert(tensors.end(), moments->begin(), moments->end());
  }
  return tensors;
}

std::vector<ShardedTensor> Optimizer::named(const std::vector<TensorView>& images) const {
  std::vector<ShardedTensor> tensors;
  const auto units = static_cast<std::ptrdiff_t>(first_.size());
  auto begin = images.begin();
  for (const char* prefix : {"", "optimizer.first.", "optimizer.second."}) {
    const std::vector<ShardedTensor> some =
        sharded_tensors(*weights_, {begin, begin + units}, prefix);
    tensors.insert(tensors.end(), some.begin(), some.end());
    begin += units;
  }
  return tensors;
}

void Optimizer::save(const std::function<void(const std::vector<ShardedTensor>&)>& use) const {
  if (copy_ != nullptr) {
    copy_->download();
    use(named(copy_->images()));
    return;
  }
  HostImages images(context_, state());
  images.download();
  use(named(images.images()));
}

void Optimizer::keep_copy() {
  copy_ = std::make_unique<HostImages>(context_, state(), HostImages::Kind::copies, host_memory_);
}

void Optimizer::load(const std::function<void(const std::vector<ShardedTensor>&)>& fill) {
  HostImages images(context_, state());
  fill(named(images.images()));
  images.upload();
  weights_->round_masters();
  weights_->share();
}

}  // namespace bifocal
