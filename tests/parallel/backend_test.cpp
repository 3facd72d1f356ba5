// The CPU as a backend, and what a build without CUDA says.
#include "parallel/backend.h"

#include <gtest/gtest.h>

#include "support/error_of.h"

namespace bifocal {
namespace {

TEST(Backend, TheCpuLimitsItsMemoryAndPassesTheHostsGroupOn) {
  const std::unique_ptr<Backend> cpu = make_cpu_backend(1 << 20);
  EXPECT_TRUE(cpu->memory().on_host());
  EXPECT_NO_THROW((void)cpu->memory().empty(Region::loss, DType::u8, {1 << 20}));
  EXPECT_THROW((void)cpu->memory().empty(Region::loss, DType::u8, {(1 << 20) + 1}), Error);
  EXPECT_TRUE(std::holds_alternative<CpuStream*>(cpu->stream().device));
  std::unique_ptr<Communicator> self = make_self_communicator();
  const Communicator* host = self.get();
  EXPECT_EQ(cpu->communicator(std::move(self)).get(), host);
}

TEST(Backend, ABuildWithoutCudaSaysWhatToDo) {
  if (kWithCuda) {
    GTEST_SKIP() << "this build has CUDA";
  }
  const std::string text = test::error_of([] { (void)make_cuda_backend(0, 0); });
  EXPECT_NE(text.find("built without CUDA: set run.device"), std::string::npos) << text;
}

}  // namespace
}  // namespace bifocal
