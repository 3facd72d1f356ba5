// The group of one, and operations in flight.
#include "parallel/communicator.h"

#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "parallel/mpi_communicator.h"

namespace bifocal {

namespace {

template <class T>
TensorView view_of(std::vector<T>& data) {
  return {data.data(), kDTypeOf<T>, {static_cast<std::int64_t>(data.size())}};
}

}  // namespace

TEST(SelfCommunicator, CopiesAndAddsWhatItHolds) {
  const auto group = make_self_communicator();
  EXPECT_EQ(group->rank(), 0);
  EXPECT_EQ(group->size(), 1);
  std::vector<float> part{1.0F, 2.0F};
  std::vector<float> whole(2);
  group->all_gather(view_of(whole), view_of(part));
  EXPECT_EQ(whole, part);
  group->all_gather(view_of(whole), view_of(whole));
  EXPECT_EQ(whole, part);
  std::vector<double> sum{0.5, 0.25};
  group->start_reduce_scatter(view_of(sum), view_of(part)).wait();
  EXPECT_EQ(sum, (std::vector<double>{1.5, 2.25}));
  group->all_reduce_sum(view_of(sum));
  group->broadcast(view_of(sum), 0);
  group->barrier();
  EXPECT_EQ(sum, (std::vector<double>{1.5, 2.25}));
  EXPECT_EQ(group->split(3)->size(), 1);
  EXPECT_EQ(group->split_node()->size(), 1);
}

TEST(SelfCommunicator, SendsToItselfInOrder) {
  const auto group = make_self_communicator();
  std::vector<float> a{1.0F};
  std::vector<float> b{2.0F, 3.0F};
  std::vector<float> none;
  std::vector<float> first(1);
  std::vector<float> second(2);
  group->exchange({{0, view_of(a)}, {0, view_of(none)}, {0, view_of(b)}},
                  {{0, view_of(first)}, {0, view_of(second)}});
  EXPECT_EQ(first, a);
  EXPECT_EQ(second, b);
}

TEST(SelfCommunicator, RefusesWhatDoesNotPairUp) {
  const auto group = make_self_communicator();
  std::vector<float> a{1.0F};
  std::vector<float> b(2);
  EXPECT_THROW(group->exchange({{0, view_of(a)}}, {}), Error);
  EXPECT_THROW(group->exchange({{0, view_of(a)}}, {{0, view_of(b)}}), Error);
  EXPECT_THROW(group->exchange({{1, view_of(a)}}, {{1, view_of(a)}}), Error);
  EXPECT_THROW(group->all_gather(view_of(b), view_of(a)), Error);
  EXPECT_THROW(group->broadcast(view_of(a), 1), Error);
  EXPECT_THROW(group->split(-1), Error);
}

TEST(RequireAllOfOne, ThrowsTheTextItself) {
  const auto group = make_self_communicator();
  require_all(*group, "");
  try {
    require_all(*group, "[disk] full");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "[disk] full");
  }
}

TEST(Pending, FinishesOnceHoweverItEnds) {
  int finished = 0;
  {
    Pending first([&] { ++finished; });
    Pending second = std::move(first);
    second.wait();
    second.wait();
    EXPECT_EQ(finished, 1);
    Pending third([&] { ++finished; });
    third = Pending([&] { finished += 10; });
    EXPECT_EQ(finished, 2);
  }
  EXPECT_EQ(finished, 12);
}

TEST(Pending, DropsErrorsOnlyWhereNobodyWaits) {
  Pending waited([] { fail("[wire] broken"); });
  EXPECT_THROW(waited.wait(), Error);
  {
    const Pending dropped([] { fail("[wire] broken"); });
  }
}

TEST(MpiSession, IsAbsentWithoutALauncher) {
  const MpiSession session(nullptr, nullptr);
  EXPECT_FALSE(session.active());
  EXPECT_EQ(session.world()->size(), 1);
  EXPECT_FALSE(mpi_library_version().empty());
}

}  // namespace bifocal
