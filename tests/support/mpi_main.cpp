// Runs every test on all ranks of an MPI job; a failure on one rank is a failure of all.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "parallel/mpi_communicator.h"
#include "support/mpi_world.h"

namespace bifocal {

namespace {

Communicator* test_world_pointer = nullptr;

// Rank 0 prints as usual; the others stay silent but for failures, each with its rank.
class FailurePrinter final : public ::testing::EmptyTestEventListener {
 public:
  explicit FailurePrinter(int rank) : rank_(rank) {}

  // A listener may not ask for the current test when it hears of a result: a lock is held then.
  void OnTestStart(const ::testing::TestInfo& info) override {
    test_ = std::string(info.test_suite_name()) + "." + info.name();
  }

  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) {
      return;
    }
    std::fprintf(stderr,
                 "[rank %d] %s %s:%d: %s\n",
                 rank_,
                 test_.c_str(),
                 result.file_name() == nullptr ? "" : result.file_name(),
                 result.line_number(),
                 result.message());
  }

 private:
  int rank_;
  std::string test_;
};

int run_tests(Communicator& world) {
  test_world_pointer = &world;
  if (world.rank() > 0) {
    ::testing::TestEventListeners& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(std::make_unique<FailurePrinter>(world.rank()).release());
  }
  // No test selected is a failure too, so that a filter or an empty file cannot pass.
  const bool failed =
      RUN_ALL_TESTS() != 0 || ::testing::UnitTest::GetInstance()->test_to_run_count() == 0;
  auto failures = static_cast<std::int64_t>(failed ? 1 : 0);
  world.all_reduce_sum({&failures, DType::i64, {1}});
  if (failures > 0 && world.rank() == 0) {
    std::fprintf(stderr, "failed on %d of %d ranks\n", static_cast<int>(failures), world.size());
  }
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

Communicator& test_world() {
  return *test_world_pointer;
}

}  // namespace bifocal

int main(int argc, char** argv) {
  bifocal::MpiSession session(&argc, &argv, true);
  try {
    ::testing::InitGoogleTest(&argc, argv);
    return bifocal::run_tests(*session.world());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    session.abort(EXIT_FAILURE);
  }
}
