// Teacher hidden states, row by row.
#include "distill/teacher.h"

#include <utility>

#include "parallel/shard.h"

namespace bifocal {

TeacherFeed::TeacherFeed(Context context,
                         Decoder& teacher,
                         Communicator& group,
                         TeacherPlacement placement,
                         GroupRows rows,
                         std::int64_t row_count)
    : context_(context),
      teacher_(&teacher),
      group_(&group),
      placement_(placement),
      rows_(std::move(rows)),
      row_count_(row_count),
      self_(group.split(group.rank())) {}

Tensor TeacherFeed::hidden(std::int64_t index, RowShard& shard) {
  if (placement_ == TeacherPlacement::ulysses) {
    const auto attention =
        group_->size() > 1 ? Block::Attention::ulysses : Block::Attention::by_tokens;
    return teacher_->forward(shard.layout, shard.ids, {}, attention);
  }
  if (ready_.empty() || index != next_) {
    ready_.clear();
    run_ahead(index);
    next_ = index;
  }
  Tensor hidden = std::move(ready_.front());
  ready_.pop_front();
  ++next_;
  return hidden;
}

void TeacherFeed::run_ahead(std::int64_t first) {
  const int ranks = group_->size();
  const std::int64_t mine = first + group_->rank();
  const Row row = mine < row_count_ ? rows_(mine) : Row{};
  RowShard whole = make_row_shard(context_, row, *self_);
  Tensor hidden = teacher_->forward(whole.layout, whole.ids);
  if (ranks == 1) {
    ready_.push_back(std::move(hidden));
    return;
  }
  const std::int64_t row_tokens = rows_(first).tokens();
  const std::int64_t own = shard_range(row_tokens, ranks, group_->rank()).size();
  std::vector<RankMessage> sends;
  std::vector<RankMessage> receives;
  for (int peer = 0; peer < ranks; ++peer) {
    if (mine < row_count_) {
      const ShardRange slice = shard_range(row_tokens, ranks, peer);
      sends.push_back({peer, hidden.rows(slice.begin, slice.end)});
    }
    if (first + peer < row_count_) {
      ready_.push_back(
          context_.memory.empty(Region::activations, context_.dtype, {own, hidden.shape()[1]}));
      receives.push_back({peer, ready_.back()});
    }
  }
  group_->exchange(sends, receives);
}

}  // namespace bifocal
