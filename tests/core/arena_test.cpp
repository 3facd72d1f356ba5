// Blocks never overlap, lie on mapped pages, and are refused only when memory is short.
#include "core/arena.h"

#include <vector>

#include <gtest/gtest.h>

#include "core/random.h"

namespace bifocal {
namespace {

constexpr std::size_t kPage = 64;

// A number of pages in all, and a record of what is mapped.
class Pages final : public PageSource {
 public:
  explicit Pages(std::size_t most) : most_(most) {}

  bool map(std::size_t page) override {
    EXPECT_FALSE(is_mapped(page)) << "page " << page;
    if (count_ == most_) {
      return false;
    }
    mapped_.resize(std::max(mapped_.size(), page + 1), false);
    mapped_[page] = true;
    ++count_;
    return true;
  }

  void unmap(std::size_t page) noexcept override {
    EXPECT_TRUE(is_mapped(page) && settled_) << "page " << page;
    mapped_[page] = false;
    --count_;
  }

  void settle() override { settled_ = true; }

  bool is_mapped(std::size_t page) const { return page < mapped_.size() && mapped_[page]; }

  std::size_t count() const { return count_; }

  bool settled() const { return settled_; }

  void queue_work() { settled_ = false; }

 private:
  std::size_t most_;
  std::size_t count_ = 0;
  bool settled_ = false;
  std::vector<bool> mapped_;
};

TEST(Arena, MapsAsManyPagesAsTheBlocksTouch) {
  Pages pages(100);
  Arena arena(pages, kPage, 400);
  EXPECT_EQ(arena.take(10), 0U);
  EXPECT_EQ(pages.count(), 1U);
  EXPECT_EQ(arena.take(54), 10U);
  EXPECT_EQ(pages.count(), 1U);
  EXPECT_EQ(arena.take(2 * kPage + 1), kPage);
  EXPECT_EQ(pages.count(), 4U);
  EXPECT_EQ(arena.mapped_bytes(), 4 * kPage);
}

TEST(Arena, GrowsByWhatTheFreeTailLacks) {
  Pages pages(100);
  Arena arena(pages, kPage, 400);
  EXPECT_EQ(arena.take(kPage / 2), 0U);
  EXPECT_EQ(arena.take(kPage), kPage / 2);
  EXPECT_EQ(pages.count(), 2U);
}

TEST(Arena, TakesTheSmallestFitAndTheLowestOfEqualOnes) {
  Pages pages(100);
  Arena arena(pages, kPage, 400);
  const std::size_t sizes[] = {30, 1, 20, 1, 20, 1, 40, 1};
  std::vector<std::size_t> at;
  for (const std::size_t size : sizes) {
    at.push_back(*arena.take(size));
  }
  for (const std::size_t freed : {0U, 2U, 4U, 6U}) {
    arena.give(at[freed], sizes[freed]);
  }
  EXPECT_EQ(arena.take(19), at[2]);
  EXPECT_EQ(arena.take(20), at[4]);
  EXPECT_EQ(arena.take(31), at[6]);
  EXPECT_EQ(arena.take(30), at[0]);
}

TEST(Arena, JoinsNeighboursWhateverTheOrderTheyComeBackIn) {
  for (const auto& order : {std::vector{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {2, 1, 0}}) {
    Pages pages(100);
    Arena arena(pages, kPage, 400);
    const std::size_t at[] = {*arena.take(10), *arena.take(10), *arena.take(10)};
    ASSERT_TRUE(arena.take(kPage - 30));
    for (const int block : order) {
      arena.give(at[block], 10);
    }
    EXPECT_EQ(arena.take(30), 0U);
    EXPECT_EQ(pages.count(), 1U);
  }
}

TEST(Arena, FreePagesMoveToWhereABlockNeedsThem) {
  Pages pages(8);
  Arena arena(pages, kPage, 32);
  std::vector<std::size_t> at;
  for (int block = 0; block < 8; ++block) {
    at.push_back(*arena.take(kPage));
  }
  for (const std::size_t freed : {0U, 2U, 4U, 6U}) {
    arena.give(at[freed], kPage);
  }
  pages.queue_work();
  // Four free pages, no two together; the last of eight is in use.
  const auto block = arena.take(4 * kPage);
  ASSERT_TRUE(block);
  EXPECT_TRUE(pages.settled());
  EXPECT_EQ(*block, 8 * kPage);
  EXPECT_EQ(pages.count(), 8U);
  EXPECT_FALSE(arena.take(1));
  // The addresses that lost their pages are used again.
  arena.give(*block, 4 * kPage);
  arena.give(at[1], kPage);
  EXPECT_EQ(arena.take(3 * kPage), 8 * kPage);
  EXPECT_EQ(arena.take(2 * kPage), 0U);
}

TEST(Arena, TrimLeavesThePagesThatBlocksTouch) {
  Pages pages(100);
  Arena arena(pages, kPage, 400);
  const std::size_t first = *arena.take(3 * kPage);
  const std::size_t second = *arena.take(10);
  const std::size_t third = *arena.take(2 * kPage);
  arena.give(first, 3 * kPage);
  arena.give(third, 2 * kPage);
  arena.trim();
  EXPECT_EQ(pages.count(), 1U);
  arena.give(second, 10);
  arena.trim();
  EXPECT_EQ(pages.count(), 0U);
  EXPECT_EQ(arena.mapped_bytes(), 0U);
}

TEST(Arena, RefusesWhatAddressesOrPagesCannotHold) {
  Pages pages(3);
  Arena arena(pages, kPage, 4);
  EXPECT_FALSE(arena.take(4 * kPage + 1));
  EXPECT_FALSE(arena.take(3 * kPage + 1));
  EXPECT_EQ(arena.take(3 * kPage), 0U);
}

// Blocks of random sizes come and go on few pages; each byte has at most one owner.
TEST(Arena, RandomBlocksNeverShareAByteAndAreRefusedOnlyWhenPagesAreShort) {
  constexpr std::size_t kPages = 24;
  Pages pages(kPages);
  Arena arena(pages, kPage, 4 * kPages);

  struct Block {
    std::size_t at, size;
  };

  std::vector<Block> blocks;
  std::vector<bool> owned(4 * kPages * kPage, false);
  const auto touched_pages = [&] {
    std::size_t touched = 0;
    for (std::size_t page = 0; page < 4 * kPages; ++page) {
      const auto begin = owned.begin() + static_cast<std::ptrdiff_t>(page * kPage);
      touched += std::find(begin, begin + kPage, true) != begin + kPage ? 1 : 0;
    }
    return touched;
  };
  std::size_t refused = 0;
  for (std::uint64_t step = 0; step < 4000; ++step) {
    pages.queue_work();
    if (!blocks.empty() && random_below(5, 1, 0, step) < 2) {
      const std::size_t which = random_below(blocks.size(), 2, 0, step);
      const Block block = blocks[which];
      std::fill_n(owned.begin() + static_cast<std::ptrdiff_t>(block.at), block.size, false);
      arena.give(block.at, block.size);
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(which));
      continue;
    }
    const std::size_t size = 1 + random_below(4 * kPage, 3, 0, step);
    const auto at = arena.take(size);
    if (!at) {
      ++refused;
      // The worst place of a block touches two pages in part.
      ASSERT_GT(touched_pages() + size / kPage + 2, kPages) << "step " << step;
      continue;
    }
    for (std::size_t byte = *at; byte < *at + size; ++byte) {
      ASSERT_FALSE(owned[byte]) << "step " << step << ", byte " << byte;
      ASSERT_TRUE(pages.is_mapped(byte / kPage)) << "step " << step << ", byte " << byte;
      owned[byte] = true;
    }
    blocks.push_back({*at, size});
  }
  EXPECT_GT(refused, 100U);
  EXPECT_EQ(arena.mapped_bytes(), pages.count() * kPage);
}

}  // namespace
}  // namespace bifocal
