// Best fit over ranges, and pages behind them.
#include "core/arena.h"

#include "core/error.h"

namespace bifocal {

Arena::Arena(PageSource& pages, std::size_t page_bytes, std::size_t page_count)
    : pages_(&pages), page_bytes_(page_bytes), mapped_(page_count, false) {
  BIFOCAL_ASSERT(page_bytes > 0);
}

std::optional<std::size_t> Arena::take(std::size_t bytes) {
  BIFOCAL_ASSERT(bytes > 0);
  std::size_t begin = 0;
  if (const auto fit = by_size_.lower_bound({bytes, 0}); fit != by_size_.end()) {
    begin = fit->second;
  } else {
    const std::optional<Place> place = place_for(bytes);
    if (!place) {
      return std::nullopt;
    }
    begin = place->begin;
    if (!map_pages(begin, begin + bytes)) {
      unmap_free_pages(begin, begin + bytes);
      if (!map_pages(begin, begin + bytes)) {
        return std::nullopt;
      }
    }
  }
  remove_free(begin, begin + bytes);
  return begin;
}

void Arena::give(std::size_t offset, std::size_t bytes) {
  add_free(offset, offset + bytes);
}

void Arena::trim() {
  unmap_free_pages(0, 0);
}

// Ranges without blocks are made of free ranges and of pages that are not mapped. Both lists are in
// order of addresses; this walks along them together.
std::optional<Arena::Place> Arena::place_for(std::size_t bytes) const {
  std::optional<Place> best;
  std::size_t begin = 0;  // of the range being joined
  std::size_t end = 0;
  const auto consider = [&] {
    if (end - begin < bytes) {
      return;
    }
    std::size_t missing = 0;
    for (std::size_t page = begin / page_bytes_; page * page_bytes_ < begin + bytes; ++page) {
      missing += mapped_[page] ? 0 : 1;
    }
    if (!best || missing < best->missing) {
      best = Place{begin, missing};
    }
  };
  const auto join = [&](std::size_t from, std::size_t to) {
    if (from != end) {
      consider();
      begin = from;
    }
    end = to;
  };
  auto range = free_.begin();
  for (std::size_t page = 0; page < mapped_.size(); ++page) {
    if (mapped_[page]) {
      continue;
    }
    const std::size_t at = page * page_bytes_;
    for (; range != free_.end() && range->first < at; ++range) {
      join(range->first, range->second);
    }
    join(at, at + page_bytes_);
  }
  for (; range != free_.end(); ++range) {
    join(range->first, range->second);
  }
  consider();
  return best;
}

bool Arena::map_pages(std::size_t begin, std::size_t end) {
  for (std::size_t page = begin / page_bytes_; page * page_bytes_ < end; ++page) {
    if (mapped_[page]) {
      continue;
    }
    if (!pages_->map(page)) {
      return false;
    }
    mapped_[page] = true;
    ++mapped_pages_;
    add_free(page * page_bytes_, (page + 1) * page_bytes_);
  }
  return true;
}

void Arena::unmap_free_pages(std::size_t keep_begin, std::size_t keep_end) {
  std::vector<std::size_t> unused;
  for (const auto& [begin, end] : free_) {
    for (std::size_t page = (begin + page_bytes_ - 1) / page_bytes_;
         (page + 1) * page_bytes_ <= end;
         ++page) {
      const bool kept = page * page_bytes_ < keep_end && (page + 1) * page_bytes_ > keep_begin;
      if (!kept) {
        unused.push_back(page);
      }
    }
  }
  if (unused.empty()) {
    return;
  }
  pages_->settle();
  for (const std::size_t page : unused) {
    remove_free(page * page_bytes_, (page + 1) * page_bytes_);
    pages_->unmap(page);
    mapped_[page] = false;
    --mapped_pages_;
  }
}

void Arena::add_free(std::size_t begin, std::size_t end) {
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == end) {
    by_size_.erase({next->second - next->first, next->first});
    end = next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    BIFOCAL_ASSERT(before->second <= begin);
    if (before->second == begin) {
      by_size_.erase({before->second - before->first, before->first});
      begin = before->first;
      free_.erase(before);
    }
  }
  free_.emplace(begin, end);
  by_size_.emplace(end - begin, begin);
}

// [begin, end) lies in one free range.
void Arena::remove_free(std::size_t begin, std::size_t end) {
  const auto holder = std::prev(free_.upper_bound(begin));
  const auto [from, to] = *holder;
  BIFOCAL_ASSERT(from <= begin && end <= to);
  by_size_.erase({to - from, from});
  free_.erase(holder);
  if (from < begin) {
    free_.emplace(from, begin);
    by_size_.emplace(begin - from, from);
  }
  if (end < to) {
    free_.emplace(end, to);
    by_size_.emplace(to - end, end);
  }
}

}  // namespace bifocal
