// The forecast of memory against real steps on one rank.
#include "train/memory_account.h"

namespace bifocal::test {
namespace {

void check(const AccountCase& account) {
  const std::unique_ptr<Backend> cpu = make_cpu_backend(0);
  AccountRun(account, make_self_communicator(), *cpu).check();
}

AccountCase one_rank(const std::string& name, StageKind stage) {
  AccountCase account{
      .name = name, .stage = stage, .config = account_config(), .model = account_model(true)};
  account.config.mesh = {.data = 1, .sequence = 1};
  return account;
}

TEST(MemoryAccount, EveryPresetIsForetoldInBothStages) {
  for (const std::string& preset : preset_names()) {
    for (const StageKind stage : {StageKind::align, StageKind::distill}) {
      AccountCase account = one_rank(preset, stage);
      if (stage == StageKind::align && preset == "swa_sink_tokens") {
        account.config.align_extra.trainable = "mixer";
      }
      account.model.mixers = make_mixers(preset, 80, {}, account.model);
      check(account);
    }
  }
}

TEST(MemoryAccount, ADepthOfDifferentLayersIsForetold) {
  for (const char* trainable : {"new", "mixer"}) {
    AccountCase account =
        one_rank(std::string("mixed layers, align ") + trainable, StageKind::align);
    account.model.mixers = mixed_layers();
    account.config.align_extra.trainable = trainable;
    check(account);
  }
  for (const char* recompute : {"none", "light", "mlp", "mixer", "block"}) {
    AccountCase account =
        one_rank(std::string("mixed layers, recompute ") + recompute, StageKind::distill);
    account.model.mixers = mixed_layers();
    account.config.memory.recompute = recompute;
    check(account);
  }
}

TEST(MemoryAccount, ValidationsAreForetold) {
  for (const std::string& preset : preset_names()) {
    AccountCase account = one_rank("validation of " + preset, StageKind::distill);
    account.config.evaluate.every = 1;
    account.config.memory.recompute = "block";
    account.model.mixers = make_mixers(preset, 80, {}, account.model);
    check(account);
  }
}

TEST(MemoryAccount, ShardedWeightsAreForetold) {
  for (const char* recompute : {"none", "light", "mlp", "mixer", "block"}) {
    AccountCase account =
        one_rank(std::string("sharded, recompute ") + recompute, StageKind::distill);
    account.model.mixers = make_mixers("bifocal", 80, {}, account.model);
    account.config.memory.weights = "shard";
    account.config.memory.recompute = recompute;
    check(account);
  }
}

TEST(MemoryAccount, AnUntiedModelWithoutHeadNormsIsForetold) {
  AccountCase account = one_rank("untied", StageKind::distill);
  account.model = account_model(false);
  account.model.mixers = make_mixers("bifocal", 80, {"0:window=full"}, account.model);
  account.config.data.rows_per_step = 2;
  check(account);
}

TEST(MemoryAccount, ABfloat16TeacherIsForetold) {
  for (const StageKind stage : {StageKind::align, StageKind::distill}) {
    AccountCase account = one_rank("bfloat16 teacher", stage);
    account.model.mixers = make_mixers("bifocal", 80, {}, account.model);
    account.teacher_storage = DType::bf16;
    check(account);
  }
}

TEST(MemoryAccount, DoublePrecisionIsForetold) {
  AccountCase account = one_rank("float64", StageKind::distill);
  account.model.mixers = make_mixers("bifocal", 80, {}, account.model);
  account.config.run.dtype = "float64";
  account.teacher_storage = DType::f64;
  check(account);
}

TEST(MemoryAccount, TheCopyThatCheckpointsAreWrittenFromIsForetold) {
  for (const char* weights : {"replicate", "shard"}) {
    AccountCase account = one_rank(std::string("state copy, ") + weights, StageKind::distill);
    account.model.mixers = make_mixers("bifocal", 80, {}, account.model);
    account.config.checkpoint.every = 10;
    account.config.memory.weights = weights;
    check(account);
  }
}

TEST(MemoryAccount, PretrainingIsForetold) {
  AccountCase account = one_rank("pretrain", StageKind::pretrain);
  check(account);
}

}  // namespace
}  // namespace bifocal::test
