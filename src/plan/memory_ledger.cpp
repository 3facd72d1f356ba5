// The account, and the two stores of flat units.
#include "plan/memory_ledger.h"

#include <algorithm>
#include <utility>

namespace bifocal {

namespace {

constexpr std::int64_t kBlock = 64;  // Memory allocates whole blocks, at least one

}  // namespace

void Ledger::change(Region region, std::int64_t bytes) {
  const auto index = static_cast<std::size_t>(region);
  current_.at(index) += bytes;
  total_ += bytes;
  peak_.regions.at(index) = std::max(peak_.regions.at(index), current_.at(index));
  peak_.total = std::max(peak_.total, total_);
}

Held::Held(Held&& other) noexcept
    : ledger_(other.ledger_),
      bytes_(std::exchange(other.bytes_, {})),
      tensors_(std::exchange(other.tensors_, 0)) {}

Held& Held::operator=(Held&& other) noexcept {
  if (this != &other) {
    release();
    ledger_ = other.ledger_;
    bytes_ = std::exchange(other.bytes_, {});
    tensors_ = std::exchange(other.tensors_, 0);
  }
  return *this;
}

void Held::add(Region region, DType dtype, std::int64_t elements) {
  const std::int64_t bytes = elements * static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t capacity = (std::max<std::int64_t>(1, bytes) + kBlock - 1) / kBlock * kBlock;
  bytes_.at(static_cast<std::size_t>(region)) += capacity;
  ++tensors_;
  ledger_->change(region, capacity);
}

void Held::release() {
  for (std::size_t region = 0; region < bytes_.size(); ++region) {
    ledger_->change(static_cast<Region>(region), -std::exchange(bytes_.at(region), 0));
  }
  tensors_ = 0;
}

std::int64_t padded_unit_size(const ParameterTable& table, std::int64_t unit, std::int64_t ranks) {
  return part_size(table.units()[static_cast<std::size_t>(unit)].size, ranks) * ranks;
}

DryWeights::DryWeights(Ledger& ledger, const ParameterTable& table, const Options& options)
    : ledger_(&ledger), table_(&table), options_(options), units_(ledger) {
  for (std::int64_t unit = 0; unit <= table.final_unit(); ++unit) {
    const std::int64_t whole = whole_size(unit);
    units_.add(
        options.region, options.storage, options.is_resident ? whole : whole / options.ranks);
    const DType wide = sum_type(options.storage);
    if (options.is_trained && wide != options.storage) {
      units_.add(Region::optimizer, wide, whole / options.ranks);
    }
  }
}

std::int64_t DryWeights::whole_size(std::int64_t unit) const {
  return padded_unit_size(*table_, unit, options_.ranks);
}

DryWeights::InFlight& DryWeights::start(std::int64_t unit) {
  InFlight& flight = in_flight_.try_emplace(unit, *ledger_).first->second;
  if (!flight.stored) {
    flight.stored.add(options_.region, options_.storage, whole_size(unit));
  }
  return flight;
}

void DryWeights::acquire(std::int64_t unit, std::int64_t next) {
  const bool is_converted = options_.storage != options_.compute;
  if (options_.is_resident || (options_.ranks == 1 && !is_converted)) {
    return;
  }
  InFlight& flight = start(unit);
  ++flight.users;
  if (is_converted && !flight.converted) {
    flight.converted.add(options_.region, options_.compute, whole_size(unit));
  }
  if (next >= 0) {
    start(next);
  }
}

void DryWeights::release(std::int64_t unit) {
  const auto found = in_flight_.find(unit);
  if (found != in_flight_.end() && --found->second.users == 0) {
    in_flight_.erase(found);
  }
}

DryGradients::DryGradients(Ledger& ledger,
                           const ParameterTable& table,
                           std::int64_t ranks,
                           DType dtype)
    : ledger_(&ledger),
      table_(&table),
      ranks_(ranks),
      dtype_(dtype),
      parts_(ledger),
      closing_(ledger) {
  for (std::int64_t unit = 0; unit <= table.final_unit(); ++unit) {
    parts_.add(Region::gradients, dtype, padded_unit_size(table, unit, ranks) / ranks);
  }
}

void DryGradients::open(std::int64_t unit) {
  if (ranks_ == 1) {  // the part itself
    return;
  }
  Held& whole = open_.try_emplace(unit, *ledger_).first->second;
  if (!whole) {
    whole.add(Region::gradients, dtype_, padded_unit_size(*table_, unit, ranks_));
  }
}

void DryGradients::close(std::int64_t unit) {
  if (ranks_ == 1) {
    return;
  }
  finish();
  const auto found = open_.find(unit);
  BIFOCAL_ASSERT(found != open_.end());
  closing_ = std::move(found->second);
  open_.erase(found);
}

void DryGradients::finish() {
  closing_.release();
}

}  // namespace bifocal
