// Golden mixers and models on the device: in float32 under the CPU's tolerances, in bfloat16 beside
// the CPU, which rounds at the same stores.
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

TEST_P(CudaGolden, MixersInBfloat16ErrAsTheirStores) {
  const std::unique_ptr<Backend> cpu = make_cpu_backend(0);
  const std::unique_ptr<Communicator> self = group();
  const std::unique_ptr<Communicator> host = make_self_communicator();
  RoundingErrors errors;
  for (const auto& path : golden_files("mixer_")) {
    errors.compare(path,
                   golden_mixer_values(path, DType::bf16, *self, *backend_),
                   golden_mixer_values(path, DType::bf16, *host, *cpu));
  }
  errors.compare_pools();
}

TEST_P(CudaGolden, ModelsInBfloat16ErrAsTheirStores) {
  const std::unique_ptr<Backend> cpu = make_cpu_backend(0);
  RoundingErrors errors;
  for (const auto& path : golden_files("model_")) {
    const GoldenModelRun run{.dtype = DType::bf16};
    errors.compare(path,
                   golden_model_values(path, run, group(), *backend_),
                   golden_model_values(path, run, make_self_communicator(), *cpu));
  }
  errors.compare_pools();
}

INSTANTIATE_TEST_SUITE_P(Portable, CudaGolden, testing::Values(Kernels::portable));
INSTANTIATE_TEST_SUITE_P(Hopper, CudaGolden, testing::Values(Kernels::automatic));

}  // namespace
}  // namespace bifocal::test
