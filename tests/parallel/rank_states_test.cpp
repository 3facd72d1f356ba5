// Which rank a job ends because of, and when, from signs at given times.
#include "parallel/rank_states.h"

#include <gtest/gtest.h>

namespace bifocal {
namespace {

constexpr WatchLimits kLimits{.heartbeat = 50.0, .progress = 600.0};

class RankStatesTest : public testing::Test {
 protected:
  RankStatesTest() {
    for (int rank = 0; rank < 3; ++rank) {
      states_.join({.rank = rank, .host = "far", .process = {.number = 100 + rank, .start = 1}},
                   0.0);
    }
  }

  // All ranks begin their `marks`-th phase, of this step.
  void beat_all(std::int64_t step, std::uint64_t marks, double now) {
    for (int rank = 0; rank < 3; ++rank) {
      beat(rank, step, marks, now);
    }
  }

  void beat(int rank, std::int64_t step, std::uint64_t marks, double now) {
    states_.beat(rank,
                 {.stage = step > 0 ? "distill" : "",
                  .step = step,
                  .phase = "student forward",
                  .marks = marks},
                 now);
  }

  std::string text(double now) const {
    const auto fault = states_.judge(now);
    return fault ? fault->text : "";
  }

  RankStates states_{3, "here", kLimits};
};

TEST_F(RankStatesTest, ASilentRankIsFoundAtTheLimit) {
  beat_all(7, 70, 10.0);
  beat(0, 7, 71, 55.0);
  beat(2, 7, 71, 55.0);
  EXPECT_FALSE(states_.judge(59.9));
  ASSERT_TRUE(states_.judge(60.0));
  EXPECT_EQ(states_.judge(60.0)->rank, 1);
  EXPECT_EQ(text(60.0),
            "bifocal: rank 1 of 3 does not answer, and the job ends\n"
            "  host:  far (process 101)\n"
            "  place: step 7 of distill, student forward\n"
            "  why:   nothing was heard of it for 50 s: it is stopped, or its host is down or cut "
            "off from this one\n");
}

TEST_F(RankStatesTest, ALostConnectionCountsAtOnceButNotAfterAFarewell) {
  states_.leave(1);
  states_.lose(1);
  EXPECT_FALSE(states_.judge(1.0));
  EXPECT_FALSE(states_.judge(49.0));
  states_.lose(2);
  EXPECT_EQ(states_.judge(1.0)->rank, 2);
  EXPECT_NE(text(1.0).find("rank 2 of 3 is gone"), std::string::npos);
}

// The judge may have the same error: it then ends the job itself.
TEST_F(RankStatesTest, AnErrorIsToldASecondLaterAndBeforeWhatFollowsFromIt) {
  states_.fail(2, {.phase = "loading the teacher", .marks = 2}, "[file] no such\nfile", 10.0);
  states_.lose(1);
  EXPECT_FALSE(states_.judge(10.9));
  EXPECT_EQ(text(11.0),
            "bifocal: rank 2 of 3 has failed, and the job ends\n"
            "  host:  far (process 102)\n"
            "  place: loading the teacher\n"
            "  why:   [file] no such\n"
            "         file\n");
}

TEST_F(RankStatesTest, OfAStandstillTheRankThatHasBegunLeastIsNamed) {
  beat_all(1, 10, 2.0);
  beat_all(2, 20, 4.0);
  for (double now = 6.0; now < 602.0; now += 2.0) {
    beat(0, 3, 31, now);  // waits for rank 1 in a later phase
    beat(1, 3, 30, now);
    beat(2, 3, 31, now);
    ASSERT_FALSE(states_.judge(now)) << now;
  }
  beat(0, 3, 31, 606.0);
  beat(1, 3, 30, 606.0);
  beat(2, 3, 31, 606.0);
  ASSERT_TRUE(states_.judge(606.0));
  EXPECT_EQ(states_.judge(606.0)->rank, 1);
  EXPECT_NE(text(606.0).find("rank 1 of 3 stands still"), std::string::npos);
  EXPECT_NE(text(606.0).find("why:   no progress for 600 s, of which 600 s are allowed"),
            std::string::npos);
  EXPECT_NE(text(606.0).find("\n         rank 2: step 3 of distill, student forward for 600 s\n"),
            std::string::npos);
}

TEST_F(RankStatesTest, ALongStepRaisesTheLimitOfProgress) {
  beat_all(0, 1, 10.0);  // loading: 90 s that are no step
  beat_all(1, 10, 100.0);
  for (double now = 110.0; now < 180.0; now += 10.0) {
    beat_all(1, 11, now);
  }
  beat_all(2, 20, 180.0);  // a step of 80 s
  for (double now = 190.0; now < 980.0; now += 10.0) {
    beat_all(2, 20, now);
    ASSERT_FALSE(states_.judge(now)) << now;
  }
  beat_all(2, 20, 980.0);
  EXPECT_TRUE(states_.judge(980.0));
}

TEST_F(RankStatesTest, WithoutMarksOrWithoutALimitNothingStandsStill) {
  RankStates unlimited(1, "here", {.heartbeat = 50.0, .progress = 0.0});
  unlimited.join({.rank = 0, .host = "here", .process = {}}, 0.0);
  unlimited.beat(0, {.marks = 1}, 0.0);
  unlimited.beat(0, {.marks = 1}, 1e6);
  EXPECT_FALSE(unlimited.judge(1e6));
  beat_all(0, 0, 1e6);
  EXPECT_FALSE(states_.judge(1e6));
}

}  // namespace
}  // namespace bifocal
