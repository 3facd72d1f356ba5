// Tensors of known values for the tests of checkpoints.
#pragma once

#include <cmath>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "core/random.h"

namespace bifocal {

struct KnownTensor {
  std::string name;
  DType dtype;
  Shape shape;
};

inline std::vector<KnownTensor> known_tensors() {
  return {{"model.layers.0.mixer.q_proj.weight", DType::f32, {5, 7}},
          {"model.norm.weight", DType::f32, {11}},
          {"moments.four.dims", DType::f64, {2, 3, 4, 5}},
          {"scalar", DType::f64, {}},
          {"nothing", DType::f32, {0, 3}}};
}

// Element `i` of a known tensor: a float32 number, so that both types hold it exactly.
inline double known_value(const std::string& name, std::int64_t i, std::uint64_t seed) {
  return static_cast<float>(random_normal(seed, stream_of(name), static_cast<std::uint64_t>(i)));
}

// Owns the memory of ranges of tensors.
class Holdings {
 public:
  // Elements [begin, end) with their known values, or with -1 in place of them.
  void add(const KnownTensor& tensor, std::int64_t begin, std::int64_t end, std::uint64_t seed) {
    add_empty(tensor, begin, end);
    ShardedTensor& part = tensors_.back();
    for (std::int64_t i = begin; i < end; ++i) {
      set(part, i - begin, known_value(tensor.name, i, seed));
    }
  }

  void add_empty(const KnownTensor& tensor, std::int64_t begin, std::int64_t end) {
    auto& bytes =
        bytes_.emplace_back(static_cast<std::size_t>((end - begin)) * size_of(tensor.dtype));
    tensors_.push_back(
        {tensor.name, tensor.shape, begin, end, {bytes.data(), tensor.dtype, {end - begin}}});
    for (std::int64_t i = 0; i < end - begin; ++i) {
      set(tensors_.back(), i, -1.0);
    }
  }

  // Number of elements that do not have their known value.
  std::int64_t wrong(std::uint64_t seed) const {
    std::int64_t count = 0;
    for (const ShardedTensor& part : tensors_) {
      for (std::int64_t i = part.begin; i < part.end; ++i) {
        const std::int64_t at = i - part.begin;
        const double value =
            part.data.dtype == DType::f64 ? part.data.as<double>()[at] : part.data.as<float>()[at];
        count += value == known_value(part.name, i, seed) ? 0 : 1;
      }
    }
    return count;
  }

  std::vector<ShardedTensor>& tensors() { return tensors_; }

  const std::vector<ShardedTensor>& tensors() const { return tensors_; }

 private:
  static void set(const ShardedTensor& part, std::int64_t at, double value) {
    if (part.data.dtype == DType::f64) {
      part.data.as<double>()[at] = value;
    } else {
      part.data.as<float>()[at] = static_cast<float>(value);
    }
  }

  std::deque<std::vector<std::uint8_t>> bytes_;
  std::vector<ShardedTensor> tensors_;
};

inline CheckpointInfo known_info(std::int64_t step) {
  return {step,
          "distil",
          step / 2,
          8 * step,
          "abc123",
          "[model]\npreset = \"bifocal\"\n",
          "{}\n",
          step / 4};
}

}  // namespace bifocal
