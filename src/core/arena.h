// Blocks in one range of addresses behind which pages are put as they are needed. Bookkeeping
// alone: the pages themselves belong to a PageSource.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace bifocal {

// The pages of an arena, by index.
class PageSource {
 public:
  PageSource() = default;
  PageSource(const PageSource&) = delete;
  PageSource& operator=(const PageSource&) = delete;
  PageSource(PageSource&&) = delete;
  PageSource& operator=(PageSource&&) = delete;
  virtual ~PageSource() = default;
  // Puts memory behind a page; false when there is none.
  virtual bool map(std::size_t page) = 0;
  // Takes the memory away again. Comes after settle().
  virtual void unmap(std::size_t page) noexcept = 0;
  // Returns when no queued work uses blocks that were given back.
  virtual void settle() = 0;
};

// Best fit among the free parts of mapped pages, neighbours joined; of equal fits the lowest. Where
// nothing fits, pages are mapped where the fewest are missing, which is after the last block unless
// trim() left a hole. When the source has no more pages, those that no block touches move: free
// memory is never refused for lying in pieces, as far as pieces are whole pages. Not thread safe.
class Arena {
 public:
  // Offsets [0, page_bytes * page_count). `pages` must outlive the arena.
  Arena(PageSource& pages, std::size_t page_bytes, std::size_t page_count);

  // Offset of a block; nothing where it does not fit. bytes > 0; offsets are multiples of whatever
  // all sizes are multiples of.
  std::optional<std::size_t> take(std::size_t bytes);
  // bytes: as it was taken.
  void give(std::size_t offset, std::size_t bytes);
  // Unmaps every page that no block touches.
  void trim();

  std::size_t mapped_bytes() const { return mapped_pages_ * page_bytes_; }

 private:
  struct Place {
    std::size_t begin = 0;
    std::size_t missing = 0;  // pages to map
  };

  std::optional<Place> place_for(std::size_t bytes) const;
  bool map_pages(std::size_t begin, std::size_t end);
  void unmap_free_pages(std::size_t keep_begin, std::size_t keep_end);
  void add_free(std::size_t begin, std::size_t end);
  void remove_free(std::size_t begin, std::size_t end);

  PageSource* pages_;
  std::size_t page_bytes_;
  std::vector<bool> mapped_;
  std::size_t mapped_pages_ = 0;
  std::map<std::size_t, std::size_t> free_;                // begin -> end, in mapped pages
  std::set<std::pair<std::size_t, std::size_t>> by_size_;  // (size, begin) of the same
};

}  // namespace bifocal
