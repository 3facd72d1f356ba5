// Golden mixers and models on one rank.
#include "support/golden.h"

#include <gtest/gtest.h>

#include "support/golden_checks.h"

namespace bifocal::test {

TEST(GoldenMixer, MatchesTheReferenceInDouble) {
  const auto self = make_self_communicator();
  for (const auto& path : golden_files("mixer_")) check_golden_mixer(path, DType::f64, *self);
}

TEST(GoldenMixer, MatchesTheReferenceInFloat) {
  const auto self = make_self_communicator();
  for (const auto& path : golden_files("mixer_")) check_golden_mixer(path, DType::f32, *self);
}

TEST(GoldenModel, MatchesTheReferenceInDouble) {
  for (const auto& path : golden_files("model_")) {
    check_golden_model(path, {.dtype = DType::f64}, make_self_communicator());
  }
}

TEST(GoldenModel, MatchesTheReferenceInFloat) {
  for (const auto& path : golden_files("model_")) {
    check_golden_model(path, {.dtype = DType::f32}, make_self_communicator());
  }
}

TEST(GoldenModel, MatchesTheReferenceWithRecomputedBlocks) {
  for (const auto& path : golden_files("model_")) {
    check_golden_model(
        path,
        {.dtype = DType::f64, .recompute = Recompute::block, .sharded_weights = true},
        make_self_communicator());
  }
}

}  // namespace bifocal::test
