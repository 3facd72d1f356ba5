// Groups of a mesh on real ranks.
#include <gtest/gtest.h>

#include "parallel/mesh.h"
#include "support/mpi_world.h"

namespace bifocal {

namespace {

void expect_mesh(int data, int sequence) {
  Communicator& world = test_world();
  const Mesh mesh(world.split(0), {data, sequence});
  EXPECT_EQ(mesh.data_count(), data);
  EXPECT_EQ(mesh.sequence_count(), sequence);
  EXPECT_EQ(mesh.world().rank(), mesh.data_index() * sequence + mesh.sequence_index());
  EXPECT_EQ(mesh.sequence().rank(), mesh.sequence_index());
  EXPECT_EQ(mesh.data().rank(), mesh.data_index());
  EXPECT_EQ(mesh.node().size(), world.size());
  std::int64_t sum = mesh.world().rank();
  mesh.sequence().all_reduce_sum({&sum, DType::i64, {1}});
  const int first = mesh.data_index() * sequence;
  EXPECT_EQ(sum, sequence * first + sequence * (sequence - 1) / 2);
}

}  // namespace

TEST(MeshOnRanks, GroupsFollowEveryFactorisation) {
  const int ranks = test_world().size();
  for (int sequence = 1; sequence <= ranks; ++sequence) {
    if (ranks % sequence == 0) {
      expect_mesh(ranks / sequence, sequence);
    }
  }
}

TEST(MeshOnRanks, InfersTheCountLeftAtZero) {
  Communicator& world = test_world();
  const Mesh by_data(world.split(0), {0, world.size()});
  EXPECT_EQ(by_data.data_count(), 1);
  const Mesh by_sequence(world.split(0), {world.size(), 0});
  EXPECT_EQ(by_sequence.sequence_count(), 1);
}

}  // namespace bifocal
