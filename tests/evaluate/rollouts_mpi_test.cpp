// Rollouts of a tiny model: the same file on any number of ranks, and after a run that was cut
// short and taken up again by another number of them.
#include <fstream>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "core/file.h"
#include "evaluate/rollouts.h"
#include "generate/generator.h"
#include "support/mpi_world.h"
#include "support/temporary_directory.h"
#include "support/tiny_model.h"

namespace bifocal::test {

namespace {

constexpr std::int64_t kProblems = 7;  // no multiple of 2, 3 or 4
constexpr std::int64_t kSamples = 3;
constexpr std::int64_t kAll = kProblems * kSamples;

const nlohmann::ordered_json kSettings{{"model", "tiny"}};

class RolloutRanks : public ::testing::Test {
 protected:
  // All ranks share the directory of rank 0.
  RolloutRanks() : shared_(broadcast_text(test_world(), directory_.path(), 0)) {
    if (test_world().rank() == 0) {
      std::ofstream file(shared_ + "/problems.jsonl");
      for (std::int64_t p = 0; p < kProblems; ++p) {
        file << nlohmann::json{{"id", p}, {"prompt_ids", {p + 1, 2 * p + 3, 5}}}.dump() << "\n";
      }
    }
    test_world().barrier();
    problems_ = ProblemSet::read(shared_ + "/problems.jsonl");
  }

  ~RolloutRanks() override { test_world().barrier(); }

  // Draws into shared_/name until this rank has `limit` samples or no more to draw, then throws.
  RolloutReport draw(Communicator& group,
                     const std::string& name,
                     std::int64_t batch,
                     std::int64_t limit = kAll) {
    Device device(DType::f32);
    const ModelConfig teacher = tiny_teacher();
    const auto self = make_self_communicator();
    TinyModel model(
        device.context(), tiny_student(teacher, tiny_students(teacher)[2].mixers), *self);
    Generator generator(device.context(), model.decoder(), batch);
    RolloutDirectory directory(
        group, shared_ + "/" + name, problems_, kSamples, kSettings, {{"commit", "c"}});
    const GenerateOptions sampling{
        .max_new_tokens = 12, .temperature = 1.0, .top_p = 0.95, .seed = 3, .stop_ids = {1, 2, 3}};
    const Answerer answer = [&](std::span<const RolloutTask> tasks, const auto& finished) {
      std::int64_t left = limit;
      std::vector<GenerateRequest> requests;
      for (const RolloutTask& task : tasks) {
        requests.push_back(
            {*problems_.problems()[static_cast<std::size_t>(task.problem)].prompt_ids,
             task.stream()});
      }
      generate(device.context(),
               generator,
               requests,
               sampling,
               {.on_finish = [&](std::int64_t request, const GeneratedAnswer& got) {
                 if (left-- == 0) {
                   fail("killed");
                 }
                 finished(static_cast<std::size_t>(request),
                          {.ids = got.ids,
                           .tokens = static_cast<std::int64_t>(got.ids.size()),
                           .stopped = got.stopped});
               }});
      if (limit < kAll) {
        fail("killed");
      }
    };
    return draw_rollouts(group, directory, problems_, kSamples, answer, [](auto...) {});
  }

  std::string merged(const std::string& name) const {
    return read_file(shared_ + "/" + name + "/rollouts.jsonl");
  }

  std::int64_t lines_in_parts(const std::string& name) const {
    std::int64_t lines = 0;
    for (const auto& entry : std::filesystem::directory_iterator(shared_ + "/" + name)) {
      if (entry.path().filename().string().starts_with("part-")) {
        const std::string text = read_file(entry.path());
        lines += std::ranges::count(text, '\n');
      }
    }
    return lines;
  }

  // What one rank draws, one sample at a time.
  std::string reference() {
    const auto self = make_self_communicator();
    const std::string name = fmt::format("reference-{}", test_world().rank());
    draw(*self, name, 1);
    return merged(name);
  }

  TemporaryDirectory directory_;
  std::string shared_;
  ProblemSet problems_;
};

TEST_F(RolloutRanks, GiveTheSameFile) {
  const std::string want = reference();
  const RolloutReport report = draw(test_world(), "run", 4);
  EXPECT_EQ(report.samples, kAll);
  EXPECT_EQ(report.drawn, kAll);
  EXPECT_EQ(merged("run"), want);
  const std::vector<Rollout> rollouts = read_rollouts(shared_ + "/run");
  // Samples of a problem differ, or the streams would not matter.
  EXPECT_NE(rollouts[0].ids, rollouts[1].ids);
  EXPECT_TRUE(std::ranges::any_of(rollouts, &Rollout::stopped));
  EXPECT_FALSE(std::ranges::all_of(rollouts, &Rollout::stopped));
}

TEST_F(RolloutRanks, GoOnAfterAKillOnAnotherNumberOfRanks) {
  const std::string want = reference();
  EXPECT_THROW(draw(test_world(), "run", 3, 2), Error);
  test_world().barrier();
  if (test_world().rank() == 0) {
    std::ofstream(shared_ + "/run/part-0000.jsonl", std::ios::app) << R"({"id":"0","sa)";
  }
  // Then rank 0 alone for a while, then all but the last rank (or one), then all.
  const auto alone = test_world().split(test_world().rank() == 0 ? 0 : 1);
  if (test_world().rank() == 0) {
    EXPECT_THROW(draw(*alone, "run", 2, 3), Error);
  }
  test_world().barrier();
  const bool takes_part = test_world().rank() < std::max(1, test_world().size() - 1);
  const auto fewer = test_world().split(takes_part ? 0 : 1);
  if (takes_part) {
    EXPECT_THROW(draw(*fewer, "run", 2, 1), Error);
  }
  test_world().barrier();
  const std::int64_t before = lines_in_parts("run");
  EXPECT_GT(before, 3);
  test_world().barrier();
  const RolloutReport report = draw(test_world(), "run", 4);
  EXPECT_EQ(report.drawn, kAll - before);  // nothing twice, nothing lost
  EXPECT_EQ(merged("run"), want);
}

TEST_F(RolloutRanks, ShareARefusal) {
  draw(test_world(), "run", 4);
  try {
    RolloutDirectory(
        test_world(), shared_ + "/run", problems_, kSamples, {{"model", "x"}}, {{"commit", "c"}});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("was made with model"), std::string::npos);
  }
}

}  // namespace

}  // namespace bifocal::test
