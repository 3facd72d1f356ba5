// Shards, windows and pinned tokens of a packed row.
#include "model/row_layout.h"

#include <algorithm>

#include "ops/elementwise.h"
#include "ops/transfer.h"
#include "parallel/shard.h"

namespace bifocal {

struct RowLayout::Need {
  std::int64_t halo_begin = 0, halo_end = 0;                  // row indices
  std::vector<std::pair<std::int64_t, std::int64_t>> pinned;  // row indices, one range a document
  std::vector<std::int32_t> pinned_first;                     // buffer row of each range
};

namespace {

// First token a query may see: inside its document and its window.
std::int64_t first_visible(std::int64_t token, std::int64_t start, std::int64_t window) {
  if (window == MixerSettings::kFullWindow) {
    return start;
  }
  return std::max(start, token - window + 1);
}

template <class T>
Tensor to_tensor(Context& context, const std::vector<T>& values) {
  Tensor tensor = context.memory.empty(
      Region::activations, kDTypeOf<T>, {static_cast<std::int64_t>(values.size())});
  const ConstTensorView host{values.data(), tensor.dtype(), tensor.shape()};
  run(context.stream, Upload{.y = tensor, .x = host});
  return tensor;
}

}  // namespace

RowLayout::RowLayout(const std::vector<std::int32_t>& start, Communicator& group, Context context)
    : start_(start), group_(&group), context_(context) {
  std::tie(begin_, end_) = shard(group.rank());
  std::vector<std::int32_t> positions;
  std::vector<std::uint8_t> starts;
  for (std::int64_t token = begin_; token < end_; ++token) {
    const std::int32_t first = start_[static_cast<std::size_t>(token)];
    positions.push_back(static_cast<std::int32_t>(token) - first);
    starts.push_back(first == token ? 1 : 0);
  }
  positions_ = to_tensor(context_, positions);
  starts_ = to_tensor(context_, starts);
}

std::pair<std::int64_t, std::int64_t> RowLayout::shard(int rank) const {
  const ShardRange range = shard_range(row_tokens(), group_->size(), rank);
  return {range.begin, range.end};
}

RowLayout::Need RowLayout::need_of(int rank, std::int64_t window, std::int64_t sink_tokens) const {
  const auto [begin, end] = shard(rank);
  Need need;
  need.halo_begin = need.halo_end = begin;
  if (begin == end) {
    return need;
  }
  need.halo_begin = first_visible(begin, start_[static_cast<std::size_t>(begin)], window);
  std::int32_t rows = 0;
  for (std::int64_t token = begin; sink_tokens > 0 && token < end; ++token) {
    const bool last_of_document =
        token + 1 == end || start_[static_cast<std::size_t>(token + 1)] == token + 1;
    if (!last_of_document) {
      continue;
    }
    const std::int64_t start = start_[static_cast<std::size_t>(token)];
    const std::int64_t pinned_end =
        std::min(start + sink_tokens, first_visible(token, start, window));
    if (pinned_end <= start) {
      continue;
    }
    need.pinned.emplace_back(start, pinned_end);
    need.pinned_first.push_back(rows);
    rows += static_cast<std::int32_t>(pinned_end - start);
  }
  return need;
}

void RowLayout::add_transfers(const Need& need, int reader, bool mine, WindowPlan& plan) const {
  const auto add = [&](std::int64_t begin,
                       std::int64_t end,
                       std::int64_t buffer_begin,
                       std::vector<TokenTransfer>& receives,
                       std::vector<TokenTransfer>& sends) {
    for (int holder = 0; holder < group_->size(); ++holder) {
      const auto [shard_begin, shard_end] = shard(holder);
      const std::int64_t from = std::max(begin, shard_begin);
      const std::int64_t to = std::min(end, shard_end);
      if (from >= to) {
        continue;
      }
      const TokenTransfer transfer{.peer = mine ? holder : reader,
                                   .local_begin = from - shard_begin,
                                   .buffer_begin = buffer_begin + from - begin,
                                   .count = to - from};
      if (mine) {
        receives.push_back(transfer);
      }
      if (holder == group_->rank()) {
        sends.push_back(transfer);
        sends.back().peer = reader;
      }
    }
  };
  add(need.halo_begin, need.halo_end, 0, plan.halo_receives, plan.halo_sends);
  for (std::size_t i = 0; i < need.pinned.size(); ++i) {
    add(need.pinned[i].first,
        need.pinned[i].second,
        need.pinned_first[i],
        plan.pinned_receives,
        plan.pinned_sends);
  }
}

const WindowPlan& RowLayout::window_plan(std::int64_t window, std::int64_t sink_tokens) {
  const auto key = std::make_pair(window, sink_tokens);
  if (const auto found = plans_.find(key); found != plans_.end()) {
    return found->second;
  }
  WindowPlan plan;
  for (int reader = 0; reader < group_->size(); ++reader) {
    const Need need = need_of(reader, window, sink_tokens);
    add_transfers(need, reader, reader == group_->rank(), plan);
  }
  const Need mine = need_of(group_->rank(), window, sink_tokens);
  plan.halo = mine.halo_end - mine.halo_begin;
  std::vector<std::int32_t> key_begin;
  std::vector<std::int32_t> pinned_begin;
  std::vector<std::int32_t> pinned_end;
  std::size_t document = 0;
  for (std::int64_t token = begin_; token < end_; ++token) {
    const std::int64_t start = start_[static_cast<std::size_t>(token)];
    const std::int64_t first = first_visible(token, start, window);
    key_begin.push_back(static_cast<std::int32_t>(first - mine.halo_begin));
    while (document < mine.pinned.size() && mine.pinned[document].first < start) {
      ++document;
    }
    const bool has_pinned = document < mine.pinned.size() && mine.pinned[document].first == start;
    const std::int32_t row = has_pinned ? mine.pinned_first[document] : 0;
    pinned_begin.push_back(row);
    pinned_end.push_back(
        has_pinned ? row + static_cast<std::int32_t>(std::min(first - start, sink_tokens)) : row);
  }
  for (const auto& [begin, end] : mine.pinned) {
    plan.pinned += end - begin;
  }
  plan.key_begin = to_tensor(context_, key_begin);
  plan.pinned_begin = to_tensor(context_, pinned_begin);
  plan.pinned_end = to_tensor(context_, pinned_end);
  return plans_.emplace(key, std::move(plan)).first->second;
}

ConstTensorView RowLayout::whole_row_key_begin() {
  if (!whole_row_key_begin_) {
    whole_row_key_begin_ = to_tensor(context_, start_);
  }
  return whole_row_key_begin_;
}

void exchange_window(const RowLayout& layout,
                     const WindowPlan& plan,
                     const ConstTensorView& local,
                     const TensorView& halo,
                     const TensorView& pinned) {
  const TensorView source{
      const_cast<void*>(local.data), local.dtype, local.shape};  // NOLINT: only read
  std::vector<RankMessage> sends;
  std::vector<RankMessage> receives;
  const auto add = [](std::vector<RankMessage>& messages,
                      const std::vector<TokenTransfer>& transfers,
                      const TensorView& rows,
                      std::int64_t TokenTransfer::*first) {
    for (const TokenTransfer& transfer : transfers) {
      messages.push_back(
          {transfer.peer, rows.rows(transfer.*first, transfer.*first + transfer.count)});
    }
  };
  add(sends, plan.halo_sends, source, &TokenTransfer::local_begin);
  add(sends, plan.pinned_sends, source, &TokenTransfer::local_begin);
  add(receives, plan.halo_receives, halo, &TokenTransfer::buffer_begin);
  add(receives, plan.pinned_receives, pinned, &TokenTransfer::buffer_begin);
  layout.group().exchange(sends, receives);
}

void return_window_gradients(Context& context,
                             const RowLayout& layout,
                             const WindowPlan& plan,
                             const TensorView& d_local,
                             const TensorView& d_halo,
                             const TensorView& d_pinned) {
  std::vector<RankMessage> sends;
  std::vector<RankMessage> receives;
  std::vector<Tensor> arrived;
  for (const auto* part : {&plan.halo_receives, &plan.pinned_receives}) {
    const TensorView& rows = part == &plan.halo_receives ? d_halo : d_pinned;
    for (const TokenTransfer& transfer : *part) {
      sends.push_back({transfer.peer,
                       rows.rows(transfer.buffer_begin, transfer.buffer_begin + transfer.count)});
    }
  }
  for (const auto* part : {&plan.halo_sends, &plan.pinned_sends}) {
    for (const TokenTransfer& transfer : *part) {
      const TensorView target =
          d_local.rows(transfer.local_begin, transfer.local_begin + transfer.count);
      arrived.push_back(context.memory.empty(Region::communication, d_local.dtype, target.shape));
      receives.push_back({transfer.peer, arrived.back()});
    }
  }
  layout.group().exchange(sends, receives);
  std::size_t next = 0;
  for (const auto* part : {&plan.halo_sends, &plan.pinned_sends}) {
    for (const TokenTransfer& transfer : *part) {
      const TensorView target =
          d_local.rows(transfer.local_begin, transfer.local_begin + transfer.count);
      run(context.stream, Add{.y = target, .a = target, .b = arrived[next++]});
    }
  }
}

}  // namespace bifocal
