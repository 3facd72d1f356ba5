// Token shards read as packed rows.
#include "data/row_source.h"

#include <algorithm>
#include <deque>
#include <filesystem>
#include <limits>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "data/pack.h"
#include "data/token_file.h"

namespace bifocal {

namespace {

constexpr std::size_t kCachedPlans = 2;  // around an epoch's end, rows of two epochs are asked for

// The files that `paths` name; a directory stands for its *.h5 files in the order of their names.
std::vector<std::string> shard_paths(const std::vector<std::string>& paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    if (!std::filesystem::is_directory(path)) {
      files.push_back(path);
      continue;
    }
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      if (entry.path().extension() == ".h5") {
        found.push_back(entry.path().string());
      }
    }
    BIFOCAL_REQUIRE(!found.empty(),
                    "[row_source] {} holds no token shard (*.h5): make some with `bifocal "
                    "tokenize`",
                    path);
    std::ranges::sort(found);
    files.insert(files.end(), found.begin(), found.end());
  }
  return files;
}

void check_options(const RowSourceOptions& options) {
  BIFOCAL_REQUIRE(!options.paths.empty(), "[row_source] no token shards are named: set data.train");
  BIFOCAL_REQUIRE(
      options.row_tokens >= 1 && options.row_tokens <= std::numeric_limits<std::int32_t>::max(),
      "[row_source] a row needs from 1 to 2^31 - 1 tokens, got {}: set data.row_tokens",
      options.row_tokens);
  BIFOCAL_REQUIRE(options.pad_id >= 0 && options.pad_id < options.vocabulary,
                  "[row_source] the padding id {} is outside the vocabulary of {}",
                  options.pad_id,
                  options.vocabulary);
}

}  // namespace

struct RowSource::Impl {
  // A shard and the number of its first document over all shards.
  struct Shard {
    TokenFile file;
    std::int64_t first_document;
  };

  struct CachedPlan {
    std::int64_t epoch;
    PackingPlan plan;
  };

  RowSourceOptions options;
  std::vector<Shard> shards;
  std::vector<std::int64_t> lengths;  // of all documents
  PackingReport report;

  // Plans are made on demand, and HDF5 handles are no business of two threads at once.
  std::mutex mutex;
  std::vector<std::int64_t> epoch_begin = {0};  // first position of the epochs seen so far
  std::deque<CachedPlan> plans;                 // newest use first

  explicit Impl(const RowSourceOptions& settings) : options(settings) {
    check_options(options);
    open_shards();
    fill_report();
  }

  void open_shards() {
    std::string hash;
    std::string first_path;
    for (const std::string& path : shard_paths(options.paths)) {
      TokenFile file(path);
      if (first_path.empty()) {
        hash = file.header().vocabulary_hash;
        first_path = path;
      }
      BIFOCAL_REQUIRE(file.header().vocabulary_hash == hash,
                      "[row_source] {} and {} were made with different vocabularies: tokenize "
                      "them with one",
                      first_path,
                      path);
      BIFOCAL_REQUIRE(file.largest_id() < options.vocabulary,
                      "[row_source] {} holds the id {}, but the model's vocabulary is {}: use the "
                      "tokenizer of the model",
                      path,
                      file.largest_id(),
                      options.vocabulary);
      if (file.header().split == options.split) {
        const auto first = static_cast<std::int64_t>(lengths.size());
        const std::span<const std::int64_t> offsets = file.offsets();
        for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
          lengths.push_back(offsets[i + 1] - offsets[i]);
        }
        shards.push_back({std::move(file), first});
      }
    }
    BIFOCAL_REQUIRE(!shards.empty(),
                    "[row_source] the token shards hold no {} document: tokenize more, or with "
                    "another held-out share",
                    split_name(options.split));
  }

  void fill_report() {
    report.documents = static_cast<std::int64_t>(lengths.size());
    for (const std::int64_t length : lengths) {
      report.tokens += length;
      report.too_long += length > options.row_tokens ? 1 : 0;
    }
    report.rows = plan_of(0).rows();
    report.padding = report.rows * options.row_tokens - report.tokens;
  }

  const PackingPlan& plan_of(std::int64_t epoch) {
    const auto found = std::ranges::find(plans, epoch, &CachedPlan::epoch);
    if (found != plans.end()) {
      std::rotate(plans.begin(), found, found + 1);
      return plans.front().plan;
    }
    plans.push_front({epoch, pack_rows(lengths, options.row_tokens, options.seed, epoch)});
    if (plans.size() > kCachedPlans) {
      plans.pop_back();
    }
    return plans.front().plan;
  }

  // The pieces of a row. Epochs differ in their number of rows, so the ones before are counted.
  std::span<const Piece> pieces_at(std::int64_t position) {
    while (epoch_begin.back() <= position) {
      const auto epoch = static_cast<std::int64_t>(epoch_begin.size()) - 1;
      epoch_begin.push_back(epoch_begin.back() + plan_of(epoch).rows());
    }
    const auto after = std::ranges::upper_bound(epoch_begin, position);
    return plan_of(after - epoch_begin.begin() - 1).row(position - *(after - 1));
  }

  // Reads a piece to tokens [at, at + piece.length) of the row.
  void read(const Piece& piece, std::int64_t at, Row& row) const {
    const auto after = std::ranges::upper_bound(
        shards, piece.document, std::ranges::less(), &Shard::first_document);
    const Shard& shard = *(after - 1);
    const auto document = static_cast<std::size_t>(piece.document - shard.first_document);
    const std::int64_t begin = shard.file.offsets()[document] + piece.begin;
    const auto first = static_cast<std::size_t>(at);
    const auto count = static_cast<std::size_t>(piece.length);
    shard.file.read_ids(begin, std::span(row.ids).subspan(first, count));
    if (options.keep == Keep::assistant) {
      shard.file.read_keep(begin, std::span(row.keep).subspan(first, count));
    } else {
      std::fill_n(row.keep.begin() + at, piece.length, std::uint8_t{1});
    }
    std::fill_n(row.start.begin() + at, piece.length, static_cast<std::int32_t>(at));
    std::copy_n(row.ids.begin() + at + 1, piece.length - 1, row.next.begin() + at);
  }

  Row row(std::int64_t position) {
    BIFOCAL_ASSERT(position >= 0);
    const std::lock_guard lock(mutex);
    const auto size = static_cast<std::size_t>(options.row_tokens);
    Row row{.ids = std::vector<std::int32_t>(size, options.pad_id),
            .next = std::vector<std::int32_t>(size, -1),
            .start = std::vector<std::int32_t>(size, 0),
            .keep = std::vector<std::uint8_t>(size, 0)};
    std::int64_t at = 0;
    for (const Piece& piece : pieces_at(position)) {
      read(piece, at, row);
      at += piece.length;
    }
    row.padding = options.row_tokens - at;
    std::fill(row.start.begin() + at, row.start.end(), static_cast<std::int32_t>(at));
    return row;
  }
};

RowSource::RowSource(const RowSourceOptions& options) : impl_(std::make_unique<Impl>(options)) {}

RowSource::~RowSource() = default;

RowSource::RowSource(RowSource&&) noexcept = default;

RowSource& RowSource::operator=(RowSource&&) noexcept = default;

Row RowSource::row(std::int64_t position) const {
  return impl_->row(position);
}

const PackingReport& RowSource::report() const {
  return impl_->report;
}

}  // namespace bifocal
