// What every token sees through a layout's plans, for any number of ranks, against the definition.
#include "model/row_layout.h"

#include <algorithm>
#include <set>

#include <gtest/gtest.h>

#include "parallel/shard.h"
#include "support/tiny_model.h"

namespace bifocal::test {

namespace {

// A rank of a group that never communicates: layouts ask for its place alone.
class Place final : public Communicator {
 public:
  Place(int rank, int size) : rank_(rank), size_(size) {}

  int rank() const override { return rank_; }

  int size() const override { return size_; }

  Pending start_all_gather(const TensorView&, const ConstTensorView&) override { fail("alone"); }

  Pending start_reduce_scatter(const TensorView&, const TensorView&) override { fail("alone"); }

  Pending start_exchange(const std::vector<RankMessage>&,
                         const std::vector<RankMessage>&) override {
    fail("alone");
  }

  void all_reduce_sum(const TensorView&) override { fail("alone"); }

  void broadcast(const TensorView&, int) override { fail("alone"); }

  void barrier() override { fail("alone"); }

  std::unique_ptr<Communicator> split(int) override { fail("alone"); }

  std::unique_ptr<Communicator> split_node() override { fail("alone"); }

 private:
  int rank_;
  int size_;
};

struct Window {
  std::int64_t window = 1;
  std::int64_t sink_tokens = 0;
};

// All ranks of one row, in one process.
class Ranks {
 public:
  Ranks(const std::vector<std::int64_t>& documents, int count)
      : row_(packed_row(documents, 10, 1)) {
    for (int rank = 0; rank < count; ++rank) {
      places_.push_back(std::make_unique<Place>(rank, count));
    }
    for (const auto& place : places_) {
      layouts_.push_back(std::make_unique<RowLayout>(row_.start, *place, device_.context()));
    }
  }

  void expect_shards_cover_the_row() {
    std::int64_t token = 0;
    for (const auto& layout : layouts_) {
      EXPECT_EQ(layout->begin(), token);
      EXPECT_EQ(layout->row_tokens(), row_.tokens());
      for (std::int64_t i = 0; i < layout->tokens(); ++i, ++token) {
        const std::int64_t start = row_.start[static_cast<std::size_t>(token)];
        EXPECT_EQ(layout->positions().as<std::int32_t>()[i], token - start);
        EXPECT_EQ(layout->starts().as<std::uint8_t>()[i], token == start ? 1 : 0);
      }
    }
    EXPECT_EQ(token, row_.tokens());
  }

  // Every query's keys are those of the definition, each once: t - W < j <= t or j among the first
  // tokens, same document.
  void expect_keys_of_the_definition(const Window& window) {
    for (std::size_t rank = 0; rank < layouts_.size(); ++rank) {
      RowLayout& layout = *layouts_[rank];
      const WindowPlan& plan = layout.window_plan(window.window, window.sink_tokens);
      const std::vector<std::int64_t> pinned = rows_of(layout, plan.pinned_receives, plan.pinned);
      const std::vector<std::int64_t> halo = rows_of(layout, plan.halo_receives, plan.halo);
      for (std::int64_t i = 0; i < plan.halo; ++i) {
        EXPECT_EQ(halo[static_cast<std::size_t>(i)], layout.begin() - plan.halo + i);
      }
      for (std::int64_t i = 0; i < layout.tokens(); ++i) {
        const std::int64_t token = layout.begin() + i;
        std::multiset<std::int64_t> seen;
        for (std::int64_t key = plan.key_begin.as<std::int32_t>()[i]; key <= plan.halo + i; ++key) {
          seen.insert(layout.begin() - plan.halo + key);
        }
        for (std::int64_t p = plan.pinned_begin.as<std::int32_t>()[i];
             p < plan.pinned_end.as<std::int32_t>()[i];
             ++p) {
          seen.insert(pinned[static_cast<std::size_t>(p)]);
        }
        EXPECT_EQ(seen, visible(token, window)) << "token " << token << ", window " << window.window
                                                << ", " << window.sink_tokens << " sink tokens";
      }
    }
  }

  // Between two ranks, messages match in order: what one sends is what the other waits for.
  void expect_transfers_pair_up(const Window& window) {
    for (std::size_t from = 0; from < layouts_.size(); ++from) {
      for (std::size_t to = 0; to < layouts_.size(); ++to) {
        const WindowPlan& sender = layouts_[from]->window_plan(window.window, window.sink_tokens);
        const WindowPlan& reader = layouts_[to]->window_plan(window.window, window.sink_tokens);
        EXPECT_EQ(with_peer(sender.halo_sends, to), with_peer(reader.halo_receives, from));
        EXPECT_EQ(with_peer(sender.pinned_sends, to), with_peer(reader.pinned_receives, from));
      }
    }
  }

 private:
  static std::vector<std::vector<std::int64_t>> with_peer(
      const std::vector<TokenTransfer>& transfers, std::size_t peer) {
    std::vector<std::vector<std::int64_t>> found;
    for (const TokenTransfer& t : transfers) {
      if (t.peer == static_cast<int>(peer)) {
        found.push_back({t.local_begin, t.buffer_begin, t.count});
      }
    }
    return found;
  }

  // Row index of each place of a reader's buffer; -1 where nothing arrives.
  static std::vector<std::int64_t> rows_of(const RowLayout& layout,
                                           const std::vector<TokenTransfer>& receives,
                                           std::int64_t size) {
    std::vector<std::int64_t> rows(static_cast<std::size_t>(size), -1);
    for (const TokenTransfer& t : receives) {
      for (std::int64_t i = 0; i < t.count; ++i) {
        std::int64_t& row = rows.at(static_cast<std::size_t>(t.buffer_begin + i));
        EXPECT_EQ(row, -1);
        row = layout.shard(t.peer).first + t.local_begin + i;
        EXPECT_LT(row, layout.shard(t.peer).second);
      }
    }
    return rows;
  }

  std::multiset<std::int64_t> visible(std::int64_t token, const Window& window) const {
    std::multiset<std::int64_t> keys;
    const std::int64_t start = row_.start[static_cast<std::size_t>(token)];
    for (std::int64_t key = start; key <= token; ++key) {
      const bool near = window.window == MixerSettings::kFullWindow || key > token - window.window;
      if (near || key < start + window.sink_tokens) {
        keys.insert(key);
      }
    }
    return keys;
  }

  Device device_{DType::f64};
  Row row_;
  std::vector<std::unique_ptr<Place>> places_;
  std::vector<std::unique_ptr<RowLayout>> layouts_;
};

const std::vector<std::vector<std::int64_t>> kRows = {
    {29}, {1, 1, 1, 1}, {3, 1, 11, 2, 5}, {1, 20, 1, 7}, {2}, {}};

TEST(RowLayout, ShardsCoverTheRowWithPositionsOfTheDocuments) {
  for (const auto& documents : kRows) {
    for (const int ranks : {1, 2, 3, 4, 7}) {
      Ranks(documents, ranks).expect_shards_cover_the_row();
    }
  }
}

TEST(RowLayout, EveryTokenSeesTheKeysOfTheDefinition) {
  for (const auto& documents : kRows) {
    for (const int ranks : {1, 2, 3, 4, 7}) {
      Ranks all(documents, ranks);
      for (const std::int64_t window : {std::int64_t{1},
                                        std::int64_t{2},
                                        std::int64_t{6},
                                        std::int64_t{29},
                                        MixerSettings::kFullWindow}) {
        for (const std::int64_t sink_tokens : {0, 1, 4}) {
          SCOPED_TRACE(fmt::format("{} ranks", ranks));
          all.expect_keys_of_the_definition({window, sink_tokens});
          all.expect_transfers_pair_up({window, sink_tokens});
        }
      }
    }
  }
}

TEST(RowLayout, WindowOfOneNeedsNoHalo) {
  Device device(DType::f32);
  Place place(1, 2);
  RowLayout layout(packed_row({12}, 10, 1).start, place, device.context());
  const WindowPlan& plan = layout.window_plan(1, 0);
  EXPECT_EQ(plan.halo, 0);
  EXPECT_TRUE(plan.halo_sends.empty());
  EXPECT_TRUE(plan.halo_receives.empty());
}

TEST(RowLayout, WholeRowKeysBeginAtTheDocuments) {
  Device device(DType::f32);
  Place place(1, 3);
  const Row row = packed_row({4, 1, 6}, 10, 1);
  RowLayout layout(row.start, place, device.context());
  const ConstTensorView begins = layout.whole_row_key_begin();
  ASSERT_EQ(begins.size(), row.tokens());
  for (std::int64_t i = 0; i < row.tokens(); ++i) {
    EXPECT_EQ(begins.as<std::int32_t>()[i], row.start[static_cast<std::size_t>(i)]);
  }
}

}  // namespace

}  // namespace bifocal::test
