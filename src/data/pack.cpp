// Packing of documents into rows.
#include "data/pack.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "core/random.h"

namespace bifocal {

namespace {

constexpr std::size_t kPool = 256;                           // pending documents of a source
constexpr std::int64_t kShareUnits = std::int64_t{1} << 24;  // in which shares are counted
const std::uint64_t kPickStream = stream_of("pack.picks");
constexpr std::size_t kSnapshots = 64;
constexpr std::int64_t kFirstStride = 16;                    // rows between snapshots
constexpr std::size_t kRecentRows = 256;                     // whose plans are kept,
constexpr std::size_t kRecentPieces = std::size_t{1} << 16;  // while they have no more pieces

// Weights as integers that sum to kShareUnits; a positive weight gets a positive one.
std::vector<std::int64_t> shares_of(const std::vector<PackSource>& sources) {
  double sum = 0.0;
  for (const PackSource& source : sources) {
    BIFOCAL_REQUIRE(std::isfinite(source.weight) && source.weight >= 0.0,
                    "[rows] source {}: wanted a finite weight of at least 0, got {}",
                    source.name,
                    source.weight);
    sum += source.weight;
  }
  BIFOCAL_REQUIRE(std::isfinite(sum) && sum > 0.0,
                  "[rows] the weights of the sources sum to {}: give at least one a positive "
                  "weight",
                  sum);
  std::vector<std::int64_t> shares;
  for (const PackSource& source : sources) {
    const auto share = std::llround(source.weight / sum * static_cast<double>(kShareUnits));
    shares.push_back(source.weight > 0.0 ? std::max<std::int64_t>(share, 1) : 0);
  }
  *std::ranges::max_element(shares) +=
      kShareUnits - std::accumulate(shares.begin(), shares.end(), std::int64_t{0});
  return shares;
}

// Of pending documents, by length, that each fit: the longest, or the longer one of a pair that
// fills the room better.
std::size_t best_fit(std::span<const RowPacker::Pending> pending, std::int64_t room) {
  std::size_t high = pending.size() - 1;
  if (high == 0 || pending[high].length + pending[high - 1].length <= room) {
    return high;
  }
  std::size_t chosen = high;
  std::int64_t best = pending[high].length;
  for (std::size_t low = 0; low < high && best < room;) {
    const std::int64_t sum = pending[low].length + pending[high].length;
    if (sum > room) {
      --high;
      continue;
    }
    if (sum > best) {
      best = sum;
      chosen = high;
    }
    ++low;
  }
  return chosen;
}

}  // namespace

std::int64_t PackCounts::tokens() const {
  std::int64_t sum = 0;
  for (const SourceCounts& source : sources) {
    sum += source.tokens;
  }
  return sum;
}

RowPacker::RowPacker(std::vector<PackSource> sources, const PackOptions& options)
    : options_(options), sources_(std::move(sources)), shares_(shares_of(sources_)) {
  BIFOCAL_ASSERT(options.row_tokens >= 1);
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    orders_.emplace_back(*sources_[i].lengths, sources_[i].name, options.seed);
    if (shares_[i] > 0) {
      active_.push_back(i);
    }
  }
  ranked_ = active_;
  state_.counts.sources.resize(sources_.size());
  state_.sources.resize(sources_.size());
}

RowPlan RowPacker::next() {
  RowPlan plan{.position = state_.counts.rows};
  std::int64_t room = options_.row_tokens;
  while (room > 0) {
    std::optional<std::size_t> source = choose(room);
    if (!source && plan.pieces.empty()) {  // all have run out, and waited for each other
      std::ranges::for_each(active_, [this](std::size_t index) { begin_epoch(index); });
      source = choose(room);
    }
    if (!source) {
      break;
    }
    // Best fits alone would leave the same documents waiting until the end of the epoch.
    const Piece piece = take(*source, room, plan.pieces.size() % 2 == 0);
    plan.pieces.push_back(piece);
    room -= piece.length;
  }
  BIFOCAL_ASSERT(!plan.pieces.empty());
  plan.padding = room;
  state_.counts.rows += 1;
  state_.counts.padding += room;
  plan.after = state_.counts;
  return plan;
}

// The source that lacks most tokens among those with a piece that fits. One that is a row ahead of
// its share waits, so that short documents do not fill more than their share of the rows' ends.
std::optional<std::size_t> RowPacker::choose(std::int64_t room) {
  const std::int64_t most_ahead = -options_.row_tokens * kShareUnits;
  std::ranges::sort(ranked_, [this](std::size_t a, std::size_t b) {
    const std::int64_t first = state_.sources[a].deficit;
    const std::int64_t second = state_.sources[b].deficit;
    return first != second ? first > second : a < b;
  });
  for (const std::size_t index : ranked_) {
    const SourceState& source = state_.sources[index];
    if (source.deficit <= most_ahead && !options_.whole_epochs) {
      break;
    }
    refill(index);
    if (!source.pool.empty() && source.pool.front().length <= room) {
      return index;
    }
  }
  return std::nullopt;
}

// Draws documents until the pool is full or the epoch has none left. A drained pool begins the next
// epoch where it need not wait.
void RowPacker::refill(std::size_t index) {
  SourceState& source = state_.sources[index];
  while (source.pool.size() < kPool) {
    if (source.next < orders_[index].documents()) {
      draw(index);
    } else if (source.pool.empty() && !options_.whole_epochs) {
      begin_epoch(index);
    } else {
      return;
    }
  }
}

void RowPacker::begin_epoch(std::size_t index) {
  SourceState& source = state_.sources[index];
  BIFOCAL_REQUIRE(source.drawn > 0,
                  "[rows] every document of {} is longer than a row of {} tokens: raise "
                  "data.row_tokens, or set data.long = \"cut\"",
                  sources_[index].name,
                  options_.row_tokens);
  ++source.epoch;
  source.next = 0;
  source.drawn = 0;
  if (options_.whole_epochs) {
    source.deficit = 0;
  }
}

// Moves the next piece of the order into the pool, or leaves out a document.
void RowPacker::draw(std::size_t index) {
  SourceState& source = state_.sources[index];
  SourceCounts& counts = state_.counts.sources[index];
  const auto [document, length] = orders_[index].at(source.epoch, source.next);
  if (length > options_.row_tokens) {
    if (options_.long_documents == LongDocuments::drop) {
      counts.dropped += 1;
      counts.dropped_tokens += length;
      source.next += 1;
      return;
    }
    counts.cut += source.cut == 0 ? 1 : 0;
  }
  const Pending pending{document, source.cut, std::min(options_.row_tokens, length - source.cut)};
  const auto place =
      std::ranges::upper_bound(source.pool, pending.length, std::ranges::less(), &Pending::length);
  source.pool.insert(place, pending);
  source.drawn += 1;
  source.cut += pending.length;
  if (source.cut == length) {
    source.cut = 0;
    source.next += 1;
  }
}

Piece RowPacker::take(std::size_t index, std::int64_t room, bool at_random) {
  SourceState& source = state_.sources[index];
  const std::vector<Pending>& pool = source.pool;
  const auto fitting = static_cast<std::size_t>(
      std::ranges::upper_bound(pool, room, std::ranges::less(), &Pending::length) - pool.begin());
  const std::size_t chosen = at_random && fitting == pool.size()
                                 ? random_below(fitting, options_.seed, kPickStream, state_.picks++)
                                 : best_fit(std::span(pool).first(fitting), room);
  const Pending pending = pool[chosen];
  source.pool.erase(source.pool.begin() + static_cast<std::ptrdiff_t>(chosen));
  SourceCounts& counts = state_.counts.sources[index];
  counts.epoch = source.epoch;
  counts.documents += pending.begin == 0 ? 1 : 0;
  counts.tokens += pending.length;
  for (const std::size_t other : active_) {
    state_.sources[other].deficit += shares_[other] * pending.length;
  }
  source.deficit -= kShareUnits * pending.length;
  return {static_cast<std::int64_t>(index), pending.document, pending.begin, pending.length};
}

RowSequence::RowSequence(RowPacker packer)
    : packer_(std::move(packer)), start_(packer_.counts()), stride_(kFirstStride) {
  snapshots_.push_back(packer_.state());
}

const RowPlan& RowSequence::row(std::int64_t position) {
  BIFOCAL_ASSERT(position >= 0);
  if (recent_.empty() || position < recent_.front().position ||
      position > recent_.back().position) {
    go_to(position);
  }
  return recent_[static_cast<std::size_t>(position - recent_.front().position)];
}

PackCounts RowSequence::counts(std::int64_t position) {
  return position == 0 ? start_ : row(position - 1).after;
}

// Makes rows up to this position, from the packer's place or from the last snapshot before it.
void RowSequence::go_to(std::int64_t position) {
  const std::int64_t here = packer_.counts().rows;
  const auto last = std::min(position / stride_, std::ssize(snapshots_) - 1);
  if (position < here || last * stride_ > here) {
    packer_.restore(snapshots_[static_cast<std::size_t>(last)]);
    recent_.clear();
    recent_pieces_ = 0;
  }
  while (packer_.counts().rows <= position) {
    if (packer_.counts().rows == std::ssize(snapshots_) * stride_) {
      snapshots_.push_back(packer_.state());
    }
    make_next();
    if (snapshots_.size() > kSnapshots) {  // every second one stays
      for (std::size_t i = 1; 2 * i < snapshots_.size(); ++i) {
        snapshots_[i] = std::move(snapshots_[2 * i]);
      }
      snapshots_.resize((snapshots_.size() + 1) / 2);
      stride_ *= 2;
    }
  }
}

void RowSequence::make_next() {
  RowPlan plan;
  try {
    plan = packer_.next();
  } catch (...) {  // half a row was taken: back to a whole state
    packer_.restore(snapshots_.front());
    recent_.clear();
    recent_pieces_ = 0;
    throw;
  }
  recent_pieces_ += plan.pieces.size();
  recent_.push_back(std::move(plan));
  while (recent_.size() > 1 && (recent_.size() > kRecentRows || recent_pieces_ > kRecentPieces)) {
    recent_pieces_ -= recent_.front().pieces.size();
    recent_.pop_front();
  }
}

}  // namespace bifocal
