// Tensors come from the source, are accounted, and leave by limit or shortage with the account.
#include "core/memory.h"

#include <gtest/gtest.h>

#include "support/error_of.h"

namespace bifocal {
namespace {

// Blocks of the host under another granule, at most so many bytes at once.
class SmallSource final : public MemorySource {
 public:
  explicit SmallSource(std::size_t most) : most_(most) {}

  bool on_host() const override { return false; }

  std::size_t granule() const override { return 512; }

  void* take(std::size_t bytes) override {
    EXPECT_EQ(bytes % 512, 0U);
    if (held_ + bytes > most_) {
      return nullptr;
    }
    held_ += bytes;
    return host_->take(bytes);
  }

  void give(void* block, std::size_t bytes) noexcept override {
    held_ -= bytes;
    host_->give(block, bytes);
  }

  void clear(void* block, std::size_t bytes) override { host_->clear(block, bytes); }

  void trim() override { host_->trim(); }

  std::size_t held_bytes() const override { return held_; }

  std::size_t peak_held_bytes() const override { return host_->peak_held_bytes(); }

  std::string shortage() const override { return "this source has no more"; }

 private:
  std::unique_ptr<MemorySource> host_ = make_host_source();
  std::size_t most_;
  std::size_t held_ = 0;
};

TEST(Memory, TensorsAreAccountedInTheGranuleOfTheirSource) {
  Memory memory(std::make_unique<SmallSource>(4096));
  EXPECT_FALSE(memory.on_host());
  {
    const Tensor a = memory.zeros(Region::weights, DType::f32, {100});
    const Tensor b = memory.empty(Region::scratch, DType::u8, {513});
    EXPECT_EQ(a.as<float>()[99], 0.0F);
    EXPECT_EQ(memory.current_bytes(Region::weights), 512U);
    EXPECT_EQ(memory.current_bytes(Region::scratch), 1024U);
    EXPECT_EQ(memory.held_bytes(), 1536U);
  }
  EXPECT_EQ(memory.held_bytes(), 0U);
  EXPECT_EQ(memory.peak_bytes(), 1536U);
}

TEST(Memory, AShortageNamesWhatWasWantedWhatThereIsAndTheAccount) {
  Memory memory(std::make_unique<SmallSource>(4096));
  const Tensor held = memory.empty(Region::optimizer, DType::f32, {512});
  const std::string text = test::error_of([&] {
    (void)memory.empty(Region::loss, DType::f32, {32, 24});
  });
  for (const char* part : {"out of memory: wanted 3.00 KiB more for loss (float32 [32, 24])",
                           "this source has no more",
                           "optimizer        now     2.00 KiB",
                           "scratch"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in:\n" << text;
  }
}

TEST(Memory, TheHostKeepsBlocksForTheirSizeUntilTrimmed) {
  Memory memory;
  EXPECT_TRUE(memory.on_host());
  const void* first = memory.empty(Region::loss, DType::u8, {1000}).view().data;
  EXPECT_EQ(memory.held_bytes(), 1024U);
  EXPECT_EQ(memory.empty(Region::cache, DType::u8, {1024}).view().data, first);
  EXPECT_EQ(memory.held_bytes(), 1024U);
  memory.trim();
  EXPECT_EQ(memory.held_bytes(), 0U);
  EXPECT_EQ(memory.peak_held_bytes(), 1024U);
}

}  // namespace
}  // namespace bifocal
