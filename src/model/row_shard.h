// One rank's part of a packed row: its layout and, per token, what the losses read.
#pragma once

#include "data/row.h"
#include "model/row_layout.h"

namespace bifocal {

struct RowShard {
  RowLayout layout;
  Tensor ids;   // [tokens] i32
  Tensor next;  // [tokens] i32, -1 where there is no successor
  Tensor keep;  // [tokens] u8
};

// This rank's part of the row among group's ranks. The group must outlive the shard.
RowShard make_row_shard(Context context, const Row& row, Communicator& group);

// Tokens of the whole row whose loss counts: kept ones, and kept ones with a successor.
struct RowCounts {
  double kept = 0.0;
  double with_next = 0.0;
};

RowCounts count_kept(const Row& row);

}  // namespace bifocal
