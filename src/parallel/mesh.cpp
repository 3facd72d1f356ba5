// Arrangement of the ranks.
#include "parallel/mesh.h"

#include <algorithm>
#include <utility>

namespace bifocal {

MeshCounts resolve_mesh(const MeshCounts& counts, int ranks) {
  BIFOCAL_REQUIRE(counts.data >= 0 && counts.sequence >= 0 && counts.data + counts.sequence > 0,
                  "[mesh] wanted mesh.data and mesh.sequence of at least 0, and not both 0, got {} "
                  "and {}: set mesh.sequence to the ranks that share a row",
                  counts.data,
                  counts.sequence);
  MeshCounts whole = counts;
  if (counts.data == 0) {
    whole.data = std::max<std::int64_t>(1, ranks / counts.sequence);
  } else if (counts.sequence == 0) {
    whole.sequence = std::max<std::int64_t>(1, ranks / counts.data);
  }
  BIFOCAL_REQUIRE(
      whole.data * whole.sequence == ranks,
      "[mesh] wanted mesh.data x mesh.sequence = {} ranks, got {} x {}: start {} ranks, "
      "or set counts that multiply to {} (mesh.data = 0 takes what mesh.sequence "
      "leaves)",
      ranks,
      whole.data,
      whole.sequence,
      whole.data * whole.sequence,
      ranks);
  return whole;
}

Mesh::Mesh(std::unique_ptr<Communicator> world, const MeshCounts& counts)
    : world_(std::move(world)) {
  const auto sequence_count = static_cast<int>(resolve_mesh(counts, world_->size()).sequence);
  sequence_ = world_->split(world_->rank() / sequence_count);
  data_ = world_->split(world_->rank() % sequence_count);
  node_ = world_->split_node();
}

}  // namespace bifocal
