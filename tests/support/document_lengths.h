// Sources of documents that have lengths only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/random.h"
#include "data/document_order.h"

namespace bifocal::test {

class ListedLengths final : public DocumentLengths {
 public:
  explicit ListedLengths(std::vector<std::int64_t> lengths) : lengths_(std::move(lengths)) {}

  std::int64_t documents() const override { return std::ssize(lengths_); }

  void read(std::int64_t first, std::span<std::int64_t> out) override {
    std::ranges::copy(std::span(lengths_).subspan(static_cast<std::size_t>(first), out.size()),
                      out.begin());
  }

  const std::vector<std::int64_t>& all() const { return lengths_; }

 private:
  std::vector<std::int64_t> lengths_;
};

// Log-normal lengths, computed when they are asked for, with counts of what was asked.
class LogNormalLengths final : public DocumentLengths {
 public:
  struct Shape {
    double mean = 1000.0;
    double sigma = 1.0;  // of the logarithm
    std::int64_t least = 1;
    std::int64_t most = 1 << 20;
  };

  LogNormalLengths(std::int64_t documents, const Shape& shape, std::uint64_t seed)
      : documents_(documents), shape_(shape), seed_(seed) {}

  std::int64_t documents() const override { return documents_; }

  void read(std::int64_t first, std::span<std::int64_t> out) override {
    ++reads_;
    entries_ += std::ssize(out);
    const double mu = std::log(shape_.mean) - shape_.sigma * shape_.sigma / 2.0;
    for (std::int64_t& length : out) {
      const double z = random_normal(seed_, 0, static_cast<std::uint64_t>(first++));
      length = std::clamp(
          static_cast<std::int64_t>(std::exp(mu + shape_.sigma * z)), shape_.least, shape_.most);
    }
  }

  std::int64_t reads() const { return reads_; }

  std::int64_t entries() const { return entries_; }

 private:
  std::int64_t documents_;
  Shape shape_;
  std::uint64_t seed_;
  std::int64_t reads_ = 0;
  std::int64_t entries_ = 0;
};

}  // namespace bifocal::test
