// Reading of document lengths in a random order.
#include "data/document_order.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace bifocal {

namespace {

constexpr std::size_t kFirstBatch = 64;  // documents; each batch has four times those before,
constexpr std::size_t kLargestBatch = std::size_t{1} << 19;  // up to here
constexpr std::int64_t kGap = 1024;    // lengths not asked for that one read takes along,
constexpr std::int64_t kSpan = 65536;  // and all that it takes

}  // namespace

DocumentOrder::DocumentOrder(DocumentLengths& lengths, std::string_view source, std::uint64_t seed)
    : lengths_(&lengths),
      documents_(lengths.documents()),
      seed_(seed),
      stream_(random_bits(stream_of("pack.documents"), stream_of(source), 0)) {
  BIFOCAL_ASSERT(documents_ >= 1);
}

DocumentOrder::Document DocumentOrder::at(std::int64_t epoch, std::int64_t place) {
  BIFOCAL_ASSERT(place >= 0 && place < documents_);
  if (epoch != epoch_ || place < begin_ ||
      place >= begin_ + static_cast<std::int64_t>(batch_.size())) {
    read_batch(epoch, place);
  }
  return batch_[static_cast<std::size_t>(place - begin_)];
}

void DocumentOrder::read_batch(std::int64_t epoch, std::int64_t place) {
  const bool continues = epoch == epoch_ && place == begin_ + std::ssize(batch_);
  const bool begins = epoch == epoch_ + 1 && place == 0;  // keeps the size
  std::size_t size = kFirstBatch;
  if (continues) {
    size = std::clamp(4 * batch_.size(), kFirstBatch, kLargestBatch);
  } else if (begins) {
    size = std::clamp(batch_.size(), kFirstBatch, kLargestBatch);
  }
  size = std::min(size, static_cast<std::size_t>(documents_ - place));
  if (!permutation_ || epoch != epoch_) {
    permutation_.emplace(static_cast<std::uint64_t>(documents_),
                         seed_,
                         random_bits(stream_, 0, static_cast<std::uint64_t>(epoch)));
  }
  epoch_ = -1;  // until the batch is whole: a read may throw
  begin_ = place;
  batch_.resize(size);
  std::vector<std::pair<std::int64_t, std::size_t>> wanted(size);  // document, index in the batch
  for (std::size_t i = 0; i < size; ++i) {
    const std::uint64_t at = static_cast<std::uint64_t>(place) + i;
    wanted[i] = {static_cast<std::int64_t>((*permutation_)(at)), i};
  }
  std::ranges::sort(wanted);
  std::vector<std::int64_t> lengths;
  for (std::size_t i = 0; i < size;) {
    const std::int64_t first = wanted[i].first;
    std::size_t end = i + 1;
    while (end < size && wanted[end].first <= wanted[end - 1].first + kGap &&
           wanted[end].first < first + kSpan) {
      ++end;
    }
    lengths.resize(static_cast<std::size_t>(wanted[end - 1].first - first + 1));
    lengths_->read(first, lengths);
    for (; i < end; ++i) {
      const auto [document, index] = wanted[i];
      batch_[index] = {document, lengths[static_cast<std::size_t>(document - first)]};
    }
  }
  epoch_ = epoch;
}

}  // namespace bifocal
