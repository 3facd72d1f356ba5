// Where the tokens of one rank's shard of a packed row stand, and what its windows need from other
// ranks.
//
// Everything here follows from the document starts of the whole row and the cut, which all ranks of
// a sequence group know, so no rank has to ask another what it needs.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "config/model_config.h"
#include "core/memory.h"
#include "model/context.h"
#include "parallel/communicator.h"

namespace bifocal {

// A run of tokens that one rank holds and another reads.
struct TokenTransfer {
  int peer = 0;
  std::int64_t local_begin = 0;   // first token, in the holder's shard
  std::int64_t buffer_begin = 0;  // first row, in the reader's halo or pinned buffer
  std::int64_t count = 0;
};

// What the windows of one mixer setting read: keys of earlier tokens (the halo, which directly
// precedes the shard) and pinned sink tokens. A transfer from a rank to itself is a copy.
struct WindowPlan {
  std::int64_t halo = 0;            // tokens before the shard
  std::int64_t pinned = 0;          // pinned keys
  Tensor key_begin;                 // [tokens] i32, see AttentionInputs
  Tensor pinned_begin, pinned_end;  // [tokens] i32; empty without sink tokens
  std::vector<TokenTransfer> halo_receives, halo_sends;
  std::vector<TokenTransfer> pinned_receives, pinned_sends;
};

class RowLayout {
 public:
  // start: as Row::start, whole row. This rank holds its contiguous part of the row among
  // group.size() parts that differ by at most one token. The group must outlive the layout.
  RowLayout(const std::vector<std::int32_t>& start, Communicator& group, Context context);

  std::int64_t begin() const { return begin_; }

  std::int64_t tokens() const { return end_ - begin_; }

  std::int64_t row_tokens() const { return static_cast<std::int64_t>(start_.size()); }

  // [begin, end) of another rank's shard.
  std::pair<std::int64_t, std::int64_t> shard(int rank) const;

  Communicator& group() const { return *group_; }

  ConstTensorView positions() const { return positions_; }  // [tokens] i32, inside the document

  ConstTensorView starts() const { return starts_; }  // [tokens] u8, 1 at a document's first token

  // The plan of a window (MixerSettings::kFullWindow allowed) with sink tokens; made once.
  const WindowPlan& window_plan(std::int64_t window, std::int64_t sink_tokens);

  // Key ranges of full attention over the whole row, [row_tokens] i32 (ulysses: heads are cut, not
  // tokens).
  ConstTensorView whole_row_key_begin();

 private:
  struct Need;  // what one rank reads
  Need need_of(int rank, std::int64_t window, std::int64_t sink_tokens) const;
  void add_transfers(const Need& need, int reader, bool mine, WindowPlan& plan) const;

  std::vector<std::int32_t> start_;
  Communicator* group_;
  Context context_;
  std::int64_t begin_ = 0;
  std::int64_t end_ = 0;
  Tensor positions_;
  Tensor starts_;
  Tensor whole_row_key_begin_;
  std::map<std::pair<std::int64_t, std::int64_t>, WindowPlan> plans_;
};

// Keys or values of other ranks' tokens into the reader's buffers. local [tokens, ...] is this
// rank's part; halo and pinned are the reader's buffers (tensors of no elements where the plan has
// none).
void exchange_window(const RowLayout& layout,
                     const WindowPlan& plan,
                     const ConstTensorView& local,
                     const TensorView& halo,
                     const TensorView& pinned);

// The way back: adds the gradients d_halo and d_pinned of every reader to the holder's d_local,
// readers in rank order.
void return_window_gradients(Context& context,
                             const RowLayout& layout,
                             const WindowPlan& plan,
                             const TensorView& d_local,
                             const TensorView& d_halo,
                             const TensorView& d_pinned);

}  // namespace bifocal
