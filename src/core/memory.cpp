// The accounted allocator.
#include "core/memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

namespace bifocal {

namespace {

class HostSource final : public MemorySource {
 public:
  HostSource() = default;
  HostSource(const HostSource&) = delete;
  HostSource& operator=(const HostSource&) = delete;
  HostSource(HostSource&&) = delete;
  HostSource& operator=(HostSource&&) = delete;

  ~HostSource() override { release_free(); }

  bool on_host() const override { return true; }

  std::size_t granule() const override { return kGranule; }

  void* take(std::size_t bytes) override {
    if (const auto found = free_.find(bytes); found != free_.end() && !found->second.empty()) {
      void* block = found->second.back();
      found->second.pop_back();
      return block;
    }
    void* block = std::aligned_alloc(kGranule, bytes);
    if (block == nullptr) {
      release_free();
      block = std::aligned_alloc(kGranule, bytes);
    }
    if (block != nullptr) {
      held_ += bytes;
      peak_held_ = std::max(peak_held_, held_);
    }
    return block;
  }

  void give(void* block, std::size_t bytes) noexcept override { free_[bytes].push_back(block); }

  void clear(void* block, std::size_t bytes) override { std::memset(block, 0, bytes); }

  void trim() override { release_free(); }

  std::size_t held_bytes() const override { return held_; }

  std::size_t peak_held_bytes() const override { return peak_held_; }

  std::string shortage() const override { return "the system has no more"; }

 private:
  static constexpr std::size_t kGranule = 64;

  void release_free() noexcept {
    for (auto& [bytes, blocks] : free_) {
      for (void* block : blocks) {
        std::free(block);
        held_ -= bytes;
      }
    }
    free_.clear();
  }

  std::map<std::size_t, std::vector<void*>> free_;
  std::size_t held_ = 0;
  std::size_t peak_held_ = 0;
};

}  // namespace

std::unique_ptr<MemorySource> make_host_source() {
  return std::make_unique<HostSource>();
}

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
    case Region::scratch:
      return "scratch";
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

Memory::Memory(std::size_t limit_bytes) : source_(make_host_source()), limit_(limit_bytes) {}

Memory::Memory(std::unique_ptr<MemorySource> source) : source_(std::move(source)) {}

Memory::~Memory() = default;

Tensor Memory::empty(Region region, DType dtype, const Shape& shape) {
  const std::size_t bytes =
      std::max<std::size_t>(1, static_cast<std::size_t>(shape.size()) * size_of(dtype));
  const std::size_t granule = source_->granule();
  const std::size_t capacity = (bytes + granule - 1) / granule * granule;
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
  void* data = source_->take(capacity);
  BIFOCAL_REQUIRE(data != nullptr,
                  "[memory] out of memory: wanted {} more for {} ({} {}), {}: use more ranks, "
                  "memory.recompute, memory.weights = \"shard\" or shorter rows\n{}",
                  format_bytes(static_cast<double>(capacity)),
                  name_of(region),
                  name_of(dtype),
                  to_string(shape),
                  source_->shortage(),
                  account());
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
  source_->clear(tensor.view().data, tensor.view().bytes());
  return tensor;
}

void Memory::release(void* data, std::size_t capacity, Region region) noexcept {
  current_.at(static_cast<std::size_t>(region)) -= capacity;
  total_ -= capacity;
  source_->give(data, capacity);
}

std::size_t Memory::current_bytes(Region region) const {
  return current_.at(static_cast<std::size_t>(region));
}

std::size_t Memory::peak_bytes(Region region) const {
  return peak_.at(static_cast<std::size_t>(region));
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
