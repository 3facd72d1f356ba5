// The forecast of memory against real steps on several ranks.
#include <algorithm>

#include "support/mpi_world.h"
#include "train/memory_account.h"

namespace bifocal::test {
namespace {

void check(const AccountCase& account) {
  const std::unique_ptr<Backend> cpu = make_cpu_backend(0);
  AccountRun(account, test_world().split(0), *cpu).check();
}

AccountCase on_mesh(const std::string& name, StageKind stage, std::int64_t sequence) {
  AccountCase account{
      .name = name, .stage = stage, .config = account_config(), .model = account_model(true)};
  account.model.mixers = mixed_layers();
  account.config.mesh = {.data = test_world().size() / sequence, .sequence = sequence};
  account.config.data.rows_per_step = test_world().size();
  return account;
}

// The ranks that share a row: all of them, and where their number is even also half of them.
std::vector<std::int64_t> sequence_counts() {
  const std::int64_t ranks = test_world().size();
  std::vector<std::int64_t> counts{ranks, 1};
  if (ranks % 2 == 0) {
    counts.push_back(ranks / 2);
  }
  return counts;
}

TEST(MemoryAccountMpi, LookAheadIsForetoldOnEveryMesh) {
  for (const std::int64_t sequence : sequence_counts()) {
    for (const StageKind stage : {StageKind::align, StageKind::distill}) {
      check(on_mesh("look-ahead", stage, sequence));
    }
  }
}

TEST(MemoryAccountMpi, UlyssesIsForetold) {
  const std::int64_t sequence = test_world().size() % 2 == 0 ? 2 : 1;
  for (const StageKind stage : {StageKind::align, StageKind::distill}) {
    AccountCase account = on_mesh("ulysses", stage, sequence);
    account.placement = TeacherPlacement::ulysses;
    account.config.align_extra.trainable = "mixer";
    check(account);
  }
}

// Every rank validates on whole rows, which take more than its shard does in a step.
TEST(MemoryAccountMpi, ValidationsAreForetold) {
  for (const std::int64_t sequence : sequence_counts()) {
    AccountCase account = on_mesh("validation", StageKind::distill, sequence);
    account.config.evaluate.every = 1;
    account.config.memory.recompute = "block";
    check(account);
  }
}

TEST(MemoryAccountMpi, ShardedWeightsAndRecomputedBlocksAreForetold) {
  for (const std::int64_t sequence : sequence_counts()) {
    AccountCase account = on_mesh("sharded", StageKind::distill, sequence);
    account.config.memory.weights = "shard";
    account.config.memory.recompute = "block";
    account.teacher_storage = DType::bf16;
    check(account);
  }
}

}  // namespace
}  // namespace bifocal::test
