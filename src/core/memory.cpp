// The accounted allocator.
#include "core/memory.h"

#include <cstdlib>
#include <cstring>
#include <utility>

namespace bifocal {

namespace {

constexpr std::size_t kAlignment = 64;

std::size_t round_up(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

std::string_view name_of(Region region) {
  switch (region) {
    case Region::weights:
      return "weights";
    case Region::teacher_weights:
      return "teacher weights";
    case Region::gradients:
      return "gradients";
    case Region::optimizer:
      return "optimizer";
    case Region::activations:
      return "activations";
    case Region::loss:
      return "loss";
    case Region::communication:
      return "communication";
    case Region::cache:
      return "cache";
    case Region::count:
      break;
  }
  return "unknown";
}

Tensor::Tensor(Tensor&& other) noexcept
    : view_(std::exchange(other.view_, {})),
      memory_(std::exchange(other.memory_, nullptr)),
      region_(other.region_),
      capacity_(std::exchange(other.capacity_, 0)) {}

Tensor& Tensor::operator=(Tensor&& other) noexcept {
  if (this != &other) {
    if (memory_ != nullptr) {
      memory_->release(view_.data, capacity_, region_);
    }
    view_ = std::exchange(other.view_, {});
    memory_ = std::exchange(other.memory_, nullptr);
    region_ = other.region_;
    capacity_ = std::exchange(other.capacity_, 0);
  }
  return *this;
}

Tensor::~Tensor() {
  if (memory_ != nullptr) {
    memory_->release(view_.data, capacity_, region_);
  }
}

Memory::Memory(std::size_t limit_bytes) : limit_(limit_bytes) {}

Memory::~Memory() {
  trim();
}

Tensor Memory::empty(Region region, DType dtype, const Shape& shape) {
  const std::size_t capacity =
      round_up(std::max<std::size_t>(1, static_cast<std::size_t>(shape.size()) * size_of(dtype)));
  BIFOCAL_REQUIRE(
      limit_ == 0 || total_ + capacity <= limit_,
      "[memory] wanted {} more for {} ({} {}), but memory.limit allows {} in all: raise "
      "memory.limit, or set memory.recompute, memory.weights or shorter rows\n{}",
      format_bytes(static_cast<double>(capacity)),
      name_of(region),
      name_of(dtype),
      to_string(shape),
      format_bytes(static_cast<double>(limit_)),
      account());
  void* data = nullptr;
  if (const auto found = free_.find(capacity); found != free_.end() && !found->second.empty()) {
    data = found->second.back();
    found->second.pop_back();
  } else {
    data = std::aligned_alloc(kAlignment, capacity);
    if (data == nullptr) {
      trim();
      data = std::aligned_alloc(kAlignment, capacity);
    }
    BIFOCAL_REQUIRE(
        data != nullptr,
        "[memory] out of memory: wanted {} more for {} ({} {}), the system has no more: "
        "use more ranks, memory.recompute, memory.weights = \"shard\" or shorter rows\n{}",
        format_bytes(static_cast<double>(capacity)),
        name_of(region),
        name_of(dtype),
        to_string(shape),
        account());
  }
  const auto index = static_cast<std::size_t>(region);
  current_.at(index) += capacity;
  peak_.at(index) = std::max(peak_.at(index), current_.at(index));
  total_ += capacity;
  total_peak_ = std::max(total_peak_, total_);
  Tensor tensor;
  tensor.view_ = {data, dtype, shape};
  tensor.memory_ = this;
  tensor.region_ = region;
  tensor.capacity_ = capacity;
  return tensor;
}

Tensor Memory::zeros(Region region, DType dtype, const Shape& shape) {
  Tensor tensor = empty(region, dtype, shape);
  std::memset(tensor.view().data, 0, tensor.view().bytes());
  return tensor;
}

void Memory::release(void* data, std::size_t capacity, Region region) noexcept {
  current_.at(static_cast<std::size_t>(region)) -= capacity;
  total_ -= capacity;
  free_[capacity].push_back(data);
}

std::size_t Memory::current_bytes(Region region) const {
  return current_.at(static_cast<std::size_t>(region));
}

std::size_t Memory::peak_bytes(Region region) const {
  return peak_.at(static_cast<std::size_t>(region));
}

void Memory::trim() {
  for (auto& [capacity, blocks] : free_) {
    for (void* block : blocks) {
      std::free(block);
    }
  }
  free_.clear();
}

std::string Memory::account() const {
  std::string text;
  for (std::size_t index = 0; index < kRegions; ++index) {
    text += fmt::format("  {:<16} now {:>12}, peak {:>12}\n",
                        name_of(static_cast<Region>(index)),
                        format_bytes(static_cast<double>(current_.at(index))),
                        format_bytes(static_cast<double>(peak_.at(index))));
  }
  return text;
}

std::string format_bytes(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (bytes >= 1024.0 && unit < 4) {
    bytes /= 1024.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.2f} {}", bytes, units[unit]);
}

}  // namespace bifocal
