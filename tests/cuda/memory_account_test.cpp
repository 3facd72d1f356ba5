// The forecast of memory against real steps on the device.
#include "train/memory_account.h"

namespace bifocal::test {
namespace {

// Rows long enough that what an op takes as scratch, whose forecast is made for long rows, is small
// beside what a step keeps.
AccountCase on_device(const std::string& name, StageKind stage, const std::string& dtype) {
  AccountCase account{
      .name = name + " in " + dtype, .stage = stage, .config = account_config(), .model = {}};
  account.model = account_model(true);
  account.model.hidden = 256;
  account.model.intermediate = 512;
  account.model.head_dim = 64;
  account.model.mixers = mixed_layers();
  account.config.run.device = "cuda";
  account.config.run.dtype = dtype;
  account.config.mesh = {.data = 1, .sequence = 1};
  account.config.data.row_tokens = 2048;
  account.teacher_storage = compute_type(account.config);
  return account;
}

class CudaMemoryAccount : public testing::TestWithParam<Kernels> {
 protected:
  void check(const AccountCase& account) const {
    const std::unique_ptr<Backend> backend = make_cuda_backend(0, 0, GetParam());
    AccountRun(account, backend->communicator(make_self_communicator()), *backend).check();
  }
};

TEST_P(CudaMemoryAccount, StagesAreForetoldInBothTypes) {
  for (const char* dtype : {"float32", "bfloat16"}) {
    for (const StageKind stage : {StageKind::align, StageKind::distill, StageKind::pretrain}) {
      check(on_device(std::string(name_of(stage)), stage, dtype));
    }
  }
}

TEST_P(CudaMemoryAccount, Bfloat16IsForetoldWhateverIsKept) {
  for (const char* recompute : {"light", "mlp", "mixer", "block"}) {
    AccountCase account = on_device(recompute, StageKind::distill, "bfloat16");
    account.config.memory.recompute = recompute;
    check(account);
  }
  for (const char* moments : {"bfloat16", "host"}) {
    AccountCase account =
        on_device(std::string("moments ") + moments, StageKind::distill, "bfloat16");
    account.config.optimizer.moments = moments;
    check(account);
  }
}

INSTANTIATE_TEST_SUITE_P(Portable, CudaMemoryAccount, testing::Values(Kernels::portable));
INSTANTIATE_TEST_SUITE_P(Hopper, CudaMemoryAccount, testing::Values(Kernels::automatic));

}  // namespace
}  // namespace bifocal::test
