// All tensor memory of a rank: owned tensors, drawn from named regions that are accounted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "core/tensor.h"

namespace bifocal {

// What memory is used for; the regions that `plan` predicts and the run reports.
enum class Region : std::uint8_t {
  weights,          // student weights in the compute type
  teacher_weights,  // this rank's part of the teacher and the layers gathered now
  gradients,        // float32 gradient shards and the layer gradients in flight
  optimizer,        // float32 master weights (where not the weights themselves), moments, and the
                    // copy of the state that a checkpoint is written from
  activations,      // what is kept between forward and backward, and layer scratch
  loss,             // logit chunks and their gradients
  communication,    // halos, states and buffers in flight
  cache,            // keys, values and states of generation
  scratch,          // what an op on a device needs while it runs
  count
};

std::string_view name_of(Region region);

// Where Memory takes its blocks from: the host, or a device. Throws nothing but what a failing
// device reports. Not thread safe.
class MemorySource {
 public:
  MemorySource() = default;
  MemorySource(const MemorySource&) = delete;
  MemorySource& operator=(const MemorySource&) = delete;
  MemorySource(MemorySource&&) = delete;
  MemorySource& operator=(MemorySource&&) = delete;
  virtual ~MemorySource() = default;

  // Whether the CPU may read and write blocks.
  virtual bool on_host() const = 0;
  // Sizes of blocks are multiples of it, and addresses too.
  virtual std::size_t granule() const = 0;
  // A block; null when there is no more memory.
  virtual void* take(std::size_t bytes) = 0;
  // Takes a block back; work that was queued before may still use it.
  virtual void give(void* block, std::size_t bytes) noexcept = 0;
  // All bits of [block, block + bytes) zero, in the order of queued work.
  virtual void clear(void* block, std::size_t bytes) = 0;
  // Returns what no block needs to the system.
  virtual void trim() = 0;
  // Bytes taken from the system, blocks that were given back included: now, and the most so far.
  virtual std::size_t held_bytes() const = 0;
  virtual std::size_t peak_held_bytes() const = 0;
  // What there is in all, for the text of an error: "the system has no more".
  virtual std::string shortage() const = 0;
};

// Blocks on the host, 64-byte aligned. Those given back are kept for others of the same size, so
// that a training step touches no fresh pages after the first.
std::unique_ptr<MemorySource> make_host_source();

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

// Allocates tensors, on the host unless another source is given. Not thread safe.
class Memory {
 public:
  // limit_bytes: most bytes that live tensors may take together; 0 for no limit.
  explicit Memory(std::size_t limit_bytes = 0);
  // A source that keeps a limit itself.
  explicit Memory(std::unique_ptr<MemorySource> source);
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

  // Whether the CPU may read and write the tensors. Others are reached by ops/transfer.h.
  bool on_host() const { return source_->on_host(); }

  // Bytes taken from the system, and the most so far: what tensors take, and what lies between
  // them.
  std::size_t held_bytes() const { return source_->held_bytes(); }

  std::size_t peak_held_bytes() const { return source_->peak_held_bytes(); }

  // Returns what no tensor needs to the system.
  void trim() { source_->trim(); }

  // A line per region: name, current, peak.
  std::string account() const;

 private:
  friend class Tensor;
  void release(void* data, std::size_t capacity, Region region) noexcept;

  static constexpr std::size_t kRegions = static_cast<std::size_t>(Region::count);
  std::unique_ptr<MemorySource> source_;
  std::size_t limit_ = 0;
  std::array<std::size_t, kRegions> current_{};
  std::array<std::size_t, kRegions> peak_{};
  std::size_t total_ = 0;
  std::size_t total_peak_ = 0;
};

// "1.25 GiB"
std::string format_bytes(double bytes);

}  // namespace bifocal
