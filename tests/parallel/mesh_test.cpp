// Counts of a mesh.
#include "parallel/mesh.h"

#include <string>

#include <gtest/gtest.h>

namespace bifocal {

TEST(Mesh, InfersOneCount) {
  EXPECT_EQ(resolve_mesh({0, 2}, 8).data, 4);
  EXPECT_EQ(resolve_mesh({4, 0}, 8).sequence, 2);
  EXPECT_EQ(resolve_mesh({2, 4}, 8).data, 2);
}

TEST(Mesh, RefusesCountsThatDoNotMultiplyToTheRanks) {
  EXPECT_THROW(resolve_mesh({0, 0}, 4), Error);
  EXPECT_THROW(resolve_mesh({-1, 2}, 4), Error);
  EXPECT_THROW(resolve_mesh({0, 3}, 4), Error);
  EXPECT_THROW(resolve_mesh({0, 8}, 4), Error);
  EXPECT_THROW(resolve_mesh({2, 3}, 4), Error);
  try {
    resolve_mesh({2, 3}, 4);
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("2 x 3"), std::string::npos) << text;
    EXPECT_NE(text.find("start 6 ranks"), std::string::npos) << text;
  }
}

TEST(Mesh, OfOneRankNeedsNoLauncher) {
  const Mesh mesh(make_self_communicator(), {0, 1});
  EXPECT_EQ(mesh.data_count(), 1);
  EXPECT_EQ(mesh.sequence_count(), 1);
  EXPECT_EQ(mesh.data_index(), 0);
  EXPECT_EQ(mesh.sequence_index(), 0);
  EXPECT_EQ(mesh.node().size(), 1);
}

}  // namespace bifocal
