// Golden mixers and models with their row cut over all ranks: the same tolerances as on one.
#include <gtest/gtest.h>

#include "support/golden.h"
#include "support/golden_checks.h"
#include "support/mpi_world.h"

namespace bifocal::test {

TEST(GoldenMixerRanks, MatchTheReferenceInDouble) {
  for (const auto& path : golden_files("mixer_"))
    check_golden_mixer(path, DType::f64, test_world());
}

TEST(GoldenMixerRanks, MatchTheReferenceInFloat) {
  for (const auto& path : golden_files("mixer_"))
    check_golden_mixer(path, DType::f32, test_world());
}

TEST(GoldenModelRanks, MatchTheReferenceWithReplicatedWeights) {
  for (const auto& path : golden_files("model_")) {
    check_golden_model(path, {.dtype = DType::f64}, test_world().split(0));
    check_golden_model(path, {.dtype = DType::f32}, test_world().split(0));
  }
}

TEST(GoldenModelRanks, MatchTheReferenceWithShardedWeightsAndRecomputation) {
  for (const auto& path : golden_files("model_")) {
    check_golden_model(
        path,
        {.dtype = DType::f64, .recompute = Recompute::block, .sharded_weights = true},
        test_world().split(0));
  }
}

// The golden models have two key-value heads, so ulysses runs on one or two ranks.
TEST(GoldenModelRanks, MatchTheReferenceWithAnUlyssesTeacher) {
  if (test_world().size() > 2) {
    EXPECT_THROW(check_golden_model(golden_files("model_").front(),
                                    {.dtype = DType::f64, .ulysses = true},
                                    test_world().split(0)),
                 Error);
    return;
  }
  for (const auto& path : golden_files("model_")) {
    check_golden_model(path, {.dtype = DType::f64, .ulysses = true}, test_world().split(0));
  }
}

}  // namespace bifocal::test
