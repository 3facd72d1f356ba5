// The order in which a source's documents are drawn, and their lengths.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/random.h"

namespace bifocal {

// Lengths of a source's documents, wherever they come from.
class DocumentLengths {
 public:
  virtual ~DocumentLengths() = default;

  // At least 1.
  virtual std::int64_t documents() const = 0;

  // Lengths (>= 1) of documents [first, first + out.size()).
  virtual void read(std::int64_t first, std::span<std::int64_t> out) = 0;
};

// Every epoch has a permutation of the documents, a function of (seed, source's name, epoch, number
// of documents). Lengths are read ahead in batches, each in the order of the documents on disk. A
// batch grows while places are asked one after another, up to a constant.
class DocumentOrder {
 public:
  struct Document {
    std::int64_t number = 0;
    std::int64_t length = 0;
  };

  // lengths must outlive the order.
  DocumentOrder(DocumentLengths& lengths, std::string_view source, std::uint64_t seed);

  std::int64_t documents() const { return documents_; }

  // The document at place [0, documents) of the epoch's order.
  Document at(std::int64_t epoch, std::int64_t place);

 private:
  void read_batch(std::int64_t epoch, std::int64_t place);

  DocumentLengths* lengths_;
  std::int64_t documents_;
  std::uint64_t seed_;
  std::uint64_t stream_;
  std::int64_t epoch_ = -1;  // of the batch
  std::int64_t begin_ = 0;   // its first place
  std::optional<RandomPermutation> permutation_;
  std::vector<Document> batch_;
};

}  // namespace bifocal
