// The ranks of a run, arranged as data x sequence, and the group of each axis.
#pragma once

#include <cstdint>
#include <memory>

#include "parallel/communicator.h"

namespace bifocal {

// Ranks along each axis; 0 for at most one of them means: as many as the run has.
struct MeshCounts {
  std::int64_t data = 0;
  std::int64_t sequence = 1;
};

// Both counts, for a run of `ranks` ranks. Throws Error (naming mesh.data and mesh.sequence) unless
// they multiply to `ranks`.
MeshCounts resolve_mesh(const MeshCounts& counts, int ranks);

// World rank = data index * sequence count + sequence index, so that the ranks that share a row are
// neighbours. The groups live as long as the mesh.
class Mesh {
 public:
  // Collective over `world`.
  Mesh(std::unique_ptr<Communicator> world, const MeshCounts& counts);

  // All ranks: also the group over which gradients and optimiser state are sharded.
  Communicator& world() const { return *world_; }

  // Ranks that share one row; rank in it = sequence_index().
  Communicator& sequence() const { return *sequence_; }

  // Ranks with this sequence index; rank in it = data_index().
  Communicator& data() const { return *data_; }

  // Ranks on this host.
  Communicator& node() const { return *node_; }

  int data_count() const { return data_->size(); }

  int sequence_count() const { return sequence_->size(); }

  int data_index() const { return data_->rank(); }

  int sequence_index() const { return sequence_->rank(); }

 private:
  std::unique_ptr<Communicator> world_;
  std::unique_ptr<Communicator> sequence_;
  std::unique_ptr<Communicator> data_;
  std::unique_ptr<Communicator> node_;
};

}  // namespace bifocal
