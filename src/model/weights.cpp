// Parts, whole units, and gathers ahead of use.
#include "model/weights.h"

#include <algorithm>

#include "ops/elementwise.h"

namespace bifocal {

std::vector<ParameterPiece> pieces_in(const ParameterTable& table,
                                      std::int64_t unit,
                                      std::int64_t begin,
                                      std::int64_t end) {
  std::vector<ParameterPiece> pieces;
  const Unit& range = table.units()[static_cast<std::size_t>(unit)];
  for (std::int64_t index = range.begin; index < range.end; ++index) {
    const Parameter& parameter = table.parameters()[static_cast<std::size_t>(index)];
    const std::int64_t from = std::max(begin, parameter.offset);
    const std::int64_t to = std::min(end, parameter.offset + parameter.size());
    if (from < to) {
      pieces.push_back({&parameter, from - parameter.offset, from - begin, to - from});
    }
  }
  return pieces;
}

Weights::Weights(Context context,
                 const ParameterTable& table,
                 Communicator& group,
                 const Options& options)
    : context_(context), table_(&table), group_(&group), options_(options) {
  BIFOCAL_ASSERT(!resident() || options.storage == context.dtype);
  for (const Unit& unit : table.units()) {
    const std::int64_t part_elements = part_size(unit.size, group.size());
    const std::int64_t elements = resident() ? part_elements * group.size() : part_elements;
    units_.push_back(context_.memory.zeros(options.region, options.storage, {elements}));
    const DType wide = sum_type(options.storage);
    if (options.is_trained && wide != options.storage) {
      masters_.push_back(context_.memory.zeros(Region::optimizer, wide, {part_elements}));
    }
  }
}

TensorView Weights::master(std::int64_t unit) const {
  return has_masters() ? masters_[static_cast<std::size_t>(unit)].view() : part(unit);
}

std::vector<TensorView> Weights::masters() const {
  std::vector<TensorView> views;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    views.push_back(master(static_cast<std::int64_t>(unit)));
  }
  return views;
}

void Weights::round_masters() {
  for (std::size_t unit = 0; unit < masters_.size(); ++unit) {
    run(context_.stream, Cast{.y = part(static_cast<std::int64_t>(unit)), .x = masters_[unit]});
  }
}

TensorView Weights::part(std::int64_t unit) const {
  const Tensor& stored = units_[static_cast<std::size_t>(unit)];
  if (!resident()) {
    return stored;
  }
  const std::int64_t size = stored.size() / group_->size();
  return stored.rows(group_->rank() * size, (group_->rank() + 1) * size);
}

ConstTensorView Weights::whole(std::int64_t unit) const {
  BIFOCAL_ASSERT(is_whole());
  return units_[static_cast<std::size_t>(unit)];
}

void Weights::for_each_piece(const Visit& function) const {
  for (std::int64_t unit = 0; unit < static_cast<std::int64_t>(units_.size()); ++unit) {
    const TensorView own = master(unit);
    const std::int64_t begin = own.size() * group_->rank();
    for (const ParameterPiece& piece : pieces_in(*table_, unit, begin, begin + own.size())) {
      function(*piece.parameter, piece.first, own.rows(piece.offset, piece.offset + piece.count));
    }
  }
}

void Weights::share() {
  if (!resident() || group_->size() == 1) {
    return;
  }
  std::vector<Pending> pending;
  for (std::int64_t unit = 0; unit < static_cast<std::int64_t>(units_.size()); ++unit) {
    pending.push_back(group_->start_all_gather(units_[static_cast<std::size_t>(unit)], part(unit)));
  }
  for (Pending& gather : pending) {
    gather.wait();
  }
}

void Weights::start(std::int64_t unit) {
  InFlight& flight = in_flight_[unit];
  if (flight.stored) {
    return;
  }
  const TensorView own = part(unit);
  flight.stored =
      context_.memory.empty(options_.region, options_.storage, {own.size() * group_->size()});
  flight.gather = group_->start_all_gather(flight.stored, own);
}

ConstTensorView Weights::acquire(std::int64_t unit, std::int64_t next) {
  const Tensor& stored = units_[static_cast<std::size_t>(unit)];
  const bool whole_here = resident() || (group_->size() == 1 && options_.storage == context_.dtype);
  if (whole_here) {
    return stored;
  }
  start(unit);
  InFlight& flight = in_flight_[unit];
  ++flight.users;
  flight.gather.wait();
  if (options_.storage != context_.dtype && !flight.whole) {
    flight.whole = context_.memory.empty(options_.region, context_.dtype, flight.stored.shape());
    run(context_.stream, Cast{.y = flight.whole, .x = flight.stored});
  }
  if (next >= 0) {
    start(next);
  }
  return flight.whole ? flight.whole : flight.stored;
}

void Weights::release(std::int64_t unit) {
  const auto found = in_flight_.find(unit);
  if (found == in_flight_.end()) {
    return;
  }
  if (--found->second.users == 0) {
    in_flight_.erase(found);
  }
}

}  // namespace bifocal
