// All tensor memory of a rank: owned tensors, drawn from named regions that are accounted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"

namespace bifocal {

// What memory is used for; the regions that `plan` predicts and the run reports.
enum class Region : std::uint8_t {
  weights,          // student weights in the compute type
  teacher_weights,  // this rank's part of the teacher and the layers gathered now
  gradients,        // float32 gradient shards and the layer gradients in flight
  optimizer,        // float32 master weights (where not the weights themselves) and moments
  activations,      // what is kept between forward and backward, and layer scratch
  loss,             // logit chunks and their gradients
  communication,    // halos, states and buffers in flight
  cache,            // keys, values and states of generation
  count
};

std::string_view name_of(Region region);

class Memory;

// An owned tensor: movable, returns its memory on destruction. Must not outlive its Memory.
class Tensor {
 public:
  Tensor() = default;
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  Tensor(Tensor&& other) noexcept;
  Tensor& operator=(Tensor&& other) noexcept;
  ~Tensor();

  TensorView view() const { return view_; }

  operator TensorView() const { return view_; }  // NOLINT(google-explicit-constructor)

  operator ConstTensorView() const { return view_; }  // NOLINT(google-explicit-constructor)

  explicit operator bool() const { return view_.data != nullptr; }

  const Shape& shape() const { return view_.shape; }

  std::int64_t size() const { return view_.size(); }

  DType dtype() const { return view_.dtype; }

  template <class T>
  T* as() const {
    return view_.as<T>();
  }

  TensorView rows(std::int64_t begin, std::int64_t end) const { return view_.rows(begin, end); }

  TensorView reshape(const Shape& shape) const { return view_.reshape(shape); }

 private:
  friend class Memory;
  TensorView view_;
  Memory* memory_ = nullptr;
  Region region_ = Region::activations;
  std::size_t capacity_ = 0;
};

// Allocates tensors on the host, 64-byte aligned. Freed blocks are kept for tensors of the same
// size, so that a training step touches no fresh pages after the first. Not thread safe.
class Memory {
 public:
  // limit_bytes: most bytes that live tensors may take together; 0 for no limit.
  explicit Memory(std::size_t limit_bytes = 0);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Elements are undefined. Throws Error naming region, size and account when memory runs out.
  Tensor empty(Region region, DType dtype, const Shape& shape);
  // All bits zero.
  Tensor zeros(Region region, DType dtype, const Shape& shape);

  std::size_t current_bytes(Region region) const;
  // Largest current_bytes(region) so far.
  std::size_t peak_bytes(Region region) const;

  // Largest sum over regions so far.
  std::size_t peak_bytes() const { return total_peak_; }

  // Returns cached blocks to the system.
  void trim();
  // A line per region: name, current, peak.
  std::string account() const;

 private:
  friend class Tensor;
  void release(void* data, std::size_t capacity, Region region) noexcept;

  static constexpr std::size_t kRegions = static_cast<std::size_t>(Region::count);
  std::size_t limit_;
  std::array<std::size_t, kRegions> current_{};
  std::array<std::size_t, kRegions> peak_{};
  std::size_t total_ = 0;
  std::size_t total_peak_ = 0;
  std::map<std::size_t, std::vector<void*>> free_;
};

// "1.25 GiB"
std::string format_bytes(double bytes);

}  // namespace bifocal
