// From a packed row to one rank's tensors.
#include "model/row_shard.h"

#include "ops/transfer.h"

namespace bifocal {

RowShard make_row_shard(Context context, const Row& row, Communicator& group) {
  RowShard shard{RowLayout(row.start, group, context), {}, {}, {}};
  const auto slice = [&](const auto& values) {
    using T = typename std::decay_t<decltype(values)>::value_type;
    Tensor tensor = context.memory.empty(Region::activations, kDTypeOf<T>, {shard.layout.tokens()});
    const ConstTensorView host{
        values.data() + shard.layout.begin(), tensor.dtype(), tensor.shape()};
    run(context.stream, Upload{.y = tensor, .x = host});
    return tensor;
  };
  shard.ids = slice(row.ids);
  shard.next = slice(row.next);
  shard.keep = slice(row.keep);
  return shard;
}

RowCounts count_kept(const Row& row) {
  RowCounts counts;
  for (std::size_t token = 0; token < row.ids.size(); ++token) {
    if (row.keep[token] == 0) {
      continue;
    }
    counts.kept += 1.0;
    if (row.next[token] >= 0) {
      counts.with_next += 1.0;
    }
  }
  return counts;
}

}  // namespace bifocal
