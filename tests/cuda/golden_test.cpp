// Golden mixers and models on the device, in float32 under the CPU's tolerances.
#include "support/golden.h"

#include <gtest/gtest.h>

#include "parallel/backend.h"
#include "support/golden_checks.h"

namespace bifocal::test {
namespace {

class CudaGolden : public testing::TestWithParam<Kernels> {
 protected:
  std::unique_ptr<Communicator> group() { return backend_->communicator(make_self_communicator()); }

  std::unique_ptr<Backend> backend_ = make_cuda_backend(0, 0, GetParam());
};

TEST_P(CudaGolden, MixersMatchTheReferenceInFloat) {
  const std::unique_ptr<Communicator> self = group();
  for (const auto& path : golden_files("mixer_")) {
    check_golden_mixer(path, DType::f32, *self, *backend_);
  }
}

TEST_P(CudaGolden, ModelsMatchTheReferenceInFloat) {
  for (const auto& path : golden_files("model_")) {
    check_golden_model(path, {.dtype = DType::f32}, group(), *backend_);
  }
}

TEST_P(CudaGolden, ModelsMatchTheReferenceWithRecomputedBlocks) {
  for (const auto& path : golden_files("model_")) {
    check_golden_model(
        path,
        {.dtype = DType::f32, .recompute = Recompute::block, .sharded_weights = true},
        group(),
        *backend_);
  }
}

INSTANTIATE_TEST_SUITE_P(Portable, CudaGolden, testing::Values(Kernels::portable));
INSTANTIATE_TEST_SUITE_P(Hopper, CudaGolden, testing::Values(Kernels::automatic));

}  // namespace
}  // namespace bifocal::test
