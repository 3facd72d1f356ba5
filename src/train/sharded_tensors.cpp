// From parts to named ranges.
#include "train/sharded_tensors.h"

namespace bifocal {

std::vector<ShardedTensor> sharded_tensors(const Weights& weights,
                                           const std::vector<TensorView>& parts,
                                           const std::string& prefix) {
  std::vector<ShardedTensor> tensors;
  for (std::size_t unit = 0; unit < parts.size(); ++unit) {
    const TensorView& part = parts[unit];
    const std::int64_t begin = part.size() * weights.group().rank();
    for (const ParameterPiece& piece :
         pieces_in(weights.table(), static_cast<std::int64_t>(unit), begin, begin + part.size())) {
      tensors.push_back({.name = prefix + piece.parameter->name,
                         .global = piece.parameter->shape,
                         .begin = piece.first,
                         .end = piece.first + piece.count,
                         .data = part.rows(piece.offset, piece.offset + piece.count)});
    }
  }
  return tensors;
}

}  // namespace bifocal
