// Token shards read as packed rows.
#include "data/row_source.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <mutex>
#include <optional>
#include <span>
#include <utility>

#include "core/error.h"
#include "data/shard_set.h"

namespace bifocal {

namespace {

void check_options(const RowSourceOptions& options) {
  BIFOCAL_REQUIRE(!options.mixture.sources.empty(),
                  "[row_source] no token shards are named: set data.train or data.mixture");
  BIFOCAL_REQUIRE(
      options.row_tokens >= 1 && options.row_tokens <= std::numeric_limits<std::int32_t>::max(),
      "[row_source] a row needs from 1 to 2^31 - 1 tokens, got {}: set data.row_tokens",
      options.row_tokens);
}

}  // namespace

double SourceSize::epochs(const SourceCounts& counts) const {
  return static_cast<double>(counts.tokens + counts.dropped_tokens) / static_cast<double>(tokens);
}

struct RowSource::Impl {
  RowSourceOptions options;
  OpenShards open;
  std::vector<std::unique_ptr<ShardSet>> sets;  // of the sources, in their order
  std::vector<SourceSize> sizes;
  // Plans are made on demand, and HDF5 handles are no business of two threads at once.
  std::mutex mutex;
  std::optional<RowSequence> sequence;

  explicit Impl(const RowSourceOptions& settings) : options(settings) {
    check_options(options);
    std::string first_shard;
    std::vector<PackSource> sources;
    for (const MixtureSource& source : options.mixture.sources) {
      sets.push_back(std::make_unique<ShardSet>(source, options.split, open, first_shard));
      check_ids(source.name, *sets.back());
      sources.push_back({source.name, source.weight, sets.back().get()});
    }
    BIFOCAL_REQUIRE(options.pad_id >= 0 && options.pad_id < options.vocabulary,
                    "[row_source] the padding id {} is outside the vocabulary of {}",
                    options.pad_id,
                    options.vocabulary);
    sequence.emplace(RowPacker(std::move(sources),
                               {.row_tokens = options.row_tokens,
                                .seed = options.seed,
                                .long_documents = options.long_documents,
                                .whole_epochs = options.split == Split::held_out}));
    fill_sizes();
  }

  void check_ids(const std::string& name, const ShardSet& set) {
    if (options.vocabulary == 0) {
      options.vocabulary = set.vocabulary();
    }
    BIFOCAL_REQUIRE(set.largest_id() < options.vocabulary,
                    "[row_source] the shards of {} hold the id {}, but the model's vocabulary is "
                    "{}: use the tokenizer of the model",
                    name,
                    set.largest_id(),
                    options.vocabulary);
  }

  void fill_sizes() {
    double sum = 0.0;
    for (const MixtureSource& source : options.mixture.sources) {
      sum += source.weight;
    }
    for (std::size_t i = 0; i < sets.size(); ++i) {
      const MixtureSource& source = options.mixture.sources[i];
      sizes.push_back({.name = source.name,
                       .weight = source.weight / sum,
                       .shards = std::ssize(sets[i]->shards()),
                       .documents = sets[i]->documents(),
                       .tokens = sets[i]->tokens()});
    }
  }

  // Reads a piece to tokens [at, at + piece.length) of the row.
  void read(const Piece& piece, std::int64_t at, Row& row) const {
    const auto first = static_cast<std::size_t>(at);
    const auto count = static_cast<std::size_t>(piece.length);
    const bool wants_keep = options.keep == Keep::assistant;
    sets[static_cast<std::size_t>(piece.source)]->read_tokens(
        piece.document,
        piece.begin,
        std::span(row.ids).subspan(first, count),
        wants_keep ? std::span(row.keep).subspan(first, count) : std::span<std::uint8_t>());
    if (!wants_keep) {
      std::fill_n(row.keep.begin() + at, piece.length, std::uint8_t{1});
    }
    std::fill_n(row.start.begin() + at, piece.length, static_cast<std::int32_t>(at));
    std::copy_n(row.ids.begin() + at + 1, piece.length - 1, row.next.begin() + at);
  }

  Row row(std::int64_t position) {
    const auto size = static_cast<std::size_t>(options.row_tokens);
    Row row{.ids = std::vector<std::int32_t>(size, options.pad_id),
            .next = std::vector<std::int32_t>(size, -1),
            .start = std::vector<std::int32_t>(size, 0),
            .keep = std::vector<std::uint8_t>(size, 0)};
    const RowPlan& plan = sequence->row(position);
    std::int64_t at = 0;
    for (const Piece& piece : plan.pieces) {
      read(piece, at, row);
      at += piece.length;
    }
    row.padding = plan.padding;
    std::fill(row.start.begin() + at, row.start.end(), static_cast<std::int32_t>(at));
    return row;
  }
};

RowSource::RowSource(const RowSourceOptions& options) : impl_(std::make_unique<Impl>(options)) {}

RowSource::~RowSource() = default;

RowSource::RowSource(RowSource&&) noexcept = default;

RowSource& RowSource::operator=(RowSource&&) noexcept = default;

Row RowSource::row(std::int64_t position) const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->row(position);
}

RowPlan RowSource::plan(std::int64_t position) const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->sequence->row(position);
}

PackCounts RowSource::counts(std::int64_t position) const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->sequence->counts(position);
}

std::int64_t RowSource::rows_without_repeats(std::int64_t most) const {
  for (std::int64_t position = 0; position < most; ++position) {
    if (!std::ranges::all_of(counts(position + 1).sources,
                             [](const SourceCounts& source) { return source.epoch == 0; })) {
      return position;
    }
  }
  return most;
}

const std::vector<SourceSize>& RowSource::sources() const {
  return impl_->sizes;
}

std::vector<std::int64_t> RowSource::length_histogram(std::size_t source) const {
  constexpr std::int64_t kAtOnce = 65536;
  ShardSet& set = *impl_->sets.at(source);
  std::vector<std::int64_t> lengths;
  std::vector<std::int64_t> histogram;
  for (std::int64_t first = 0; first < set.documents(); first += kAtOnce) {
    lengths.resize(static_cast<std::size_t>(std::min(kAtOnce, set.documents() - first)));
    const std::lock_guard lock(impl_->mutex);
    set.read(first, lengths);
    for (const std::int64_t length : lengths) {
      const auto power =
          static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(length)) - 1);
      histogram.resize(std::max(histogram.size(), power + 1));
      ++histogram[power];
    }
  }
  return histogram;
}

}  // namespace bifocal
