// Rollouts on disk: lines, run directories that are taken up again, and every refusal.
#include "evaluate/rollout_file.h"

#include <fstream>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "core/file.h"
#include "evaluate/rollouts.h"
#include "support/error_of.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr std::int64_t kSamples = 3;

template <class Work>
void expect_error(const Work& work, const std::string& part) {
  const std::string text = test::error_of(work);
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(RolloutLine, ReadsBackEqual) {
  const Rollout rollout{
      .id = "a\"b", .sample = 2, .text = "x\ny", .ids = {1, 2, 3}, .tokens = 3, .stopped = true};
  const std::string line = rollout_line(rollout);
  EXPECT_EQ(line,
            R"({"id":"a\"b","sample":2,"answer":"x\ny","answer_ids":[1,2,3],"tokens":3,)"
            R"("finish_reason":"stop"})");
  const Rollout read = parse_rollout(nlohmann::json::parse(line));
  EXPECT_EQ(read.id, rollout.id);
  EXPECT_EQ(read.sample, 2);
  EXPECT_EQ(read.text, rollout.text);
  EXPECT_EQ(read.ids, rollout.ids);
  EXPECT_EQ(read.tokens, 3);
  EXPECT_TRUE(read.stopped);
  EXPECT_EQ(rollout_line({.id = "a"}).find("\"answer\":"), std::string::npos);
  // Bytes that are no UTF-8 do not end a run.
  EXPECT_NE(rollout_line({.id = "a", .text = "\xff"}).find("\xef\xbf\xbd"), std::string::npos);
}

TEST(RolloutLine, RefusesWhatIsNone) {
  const auto refused = [](const char* text, const char* part) {
    expect_error([&] { parse_rollout(nlohmann::json::parse(text)); }, part);
  };
  refused("[]", "an object with id");
  refused(R"({"sample": 1})", "an object with id");
  refused(R"({"id": "a", "sample": -1})", "a sample number from 0 on");
  refused(R"({"id": "a", "finish_reason": "stop"})", "tokens or answer_ids");
  refused(R"({"id": "a", "tokens": -1, "finish_reason": "stop"})", "at least 0 tokens");
  refused(R"({"id": "a", "tokens": 1, "finish_reason": "eos"})", "stop or length");
  EXPECT_THROW(parse_rollout(nlohmann::json::parse(R"({"id": "a", "tokens": 1})")),
               nlohmann::json::exception);
}

TEST(Tasks, AreDealtByProblem) {
  const std::vector<std::uint8_t> none(5 * kSamples, 0);
  for (const int ranks : {1, 2, 3, 5}) {
    std::vector<int> owner(none.size(), -1);
    for (int rank = 0; rank < ranks; ++rank) {
      for (const RolloutTask& task : tasks_of_rank(none, kSamples, rank, ranks)) {
        int& place = owner[static_cast<std::size_t>(task.problem * kSamples + task.sample)];
        EXPECT_EQ(place, -1);
        place = rank;
        EXPECT_EQ(rank, task.problem % ranks);
      }
    }
    EXPECT_EQ(std::ranges::count(owner, -1), 0);
  }
}

TEST(Tasks, AreDealtBySampleWhereProblemsAreFew) {
  std::vector<std::uint8_t> done(5 * kSamples, 1);
  done[4] = done[5] = done[9] = 0;  // two of problem 1, one of problem 3
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(tasks_of_rank(done, kSamples, rank, 3).size(), 1U);
  }
  EXPECT_EQ(tasks_of_rank(done, kSamples, 0, 2).size(), 2U);
  EXPECT_TRUE(tasks_of_rank(done, kSamples, 3, 4).empty());
}

TEST(Tasks, HaveStreamsOfTheirOwn) {
  EXPECT_NE((RolloutTask{1, 0}.stream()), (RolloutTask{0, kMostSamples - 1}.stream()));
  EXPECT_EQ((RolloutTask{0, 5}.stream()), 5U);
}

class RolloutDirectories : public ::testing::Test {
 protected:
  RolloutDirectories() {
    std::ofstream file(directory_.path("problems.jsonl"));
    for (int i = 0; i < 4; ++i) {
      file << R"({"id": "p)" << i << R"(", "prompt": "?"})"
           << "\n";
    }
    file.close();
    problems_ = ProblemSet::read(directory_.path("problems.jsonl"));
  }

  std::string run() const { return directory_.path("run"); }

  std::unique_ptr<RolloutDirectory> open(const Json& settings, const std::string& commit = "c1") {
    return std::make_unique<RolloutDirectory>(
        *world_, run(), problems_, kSamples, settings, Json{{"commit", commit}});
  }

  // What a model would say: a function of the stream alone.
  static Rollout answer_to(const RolloutTask& task) {
    return {.text = fmt::format("answer {}", task.stream()),
            .ids = {static_cast<std::int32_t>(task.sample)},
            .tokens = 1 + task.problem,
            .stopped = task.sample != 1};
  }

  // Draws until `limit` samples are there, then throws as a run that is killed.
  RolloutReport draw(RolloutDirectory& directory, std::int64_t limit = 1000) {
    const Answerer answer = [&](std::span<const RolloutTask> tasks, const auto& finished) {
      for (std::size_t i = 0; i < tasks.size(); ++i) {
        if (limit-- == 0) {
          fail("killed");
        }
        const std::size_t task = tasks.size() - 1 - i;  // any order will do
        finished(task, answer_to(tasks[task]));
      }
    };
    return draw_rollouts(*world_, directory, problems_, kSamples, answer, [](auto...) {});
  }

  std::string merged() const { return read_file(run() + "/rollouts.jsonl"); }

  std::string whole_run() {
    const test::TemporaryDirectory other;
    RolloutDirectory directory(
        *world_, other.path("run"), problems_, kSamples, settings_, Json{{"commit", "c1"}});
    draw(directory);
    return read_file(other.path("run/rollouts.jsonl"));
  }

  test::TemporaryDirectory directory_;
  std::unique_ptr<Communicator> world_ = make_self_communicator();
  ProblemSet problems_;
  Json settings_{{"model", "m"}, {"seed", 1}};
};

TEST_F(RolloutDirectories, HoldEverySampleInOrder) {
  const RolloutReport report = draw(*open(settings_));
  EXPECT_EQ(report.samples, 12);
  EXPECT_EQ(report.drawn, 12);
  EXPECT_EQ(report.tokens, 3 * (1 + 2 + 3 + 4));
  const std::vector<Rollout> rollouts = read_rollouts(run());
  ASSERT_EQ(rollouts.size(), 12U);
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    EXPECT_EQ(rollouts[i].id, fmt::format("p{}", i / kSamples));
    EXPECT_EQ(rollouts[i].sample, static_cast<std::int64_t>(i % kSamples));
    EXPECT_EQ(rollouts[i].stopped, i % kSamples != 1);
  }
  EXPECT_EQ(rollout_settings(run()), nlohmann::json(settings_));
  EXPECT_EQ(rollout_settings(run() + "/rollouts.jsonl"), nlohmann::json(settings_));
  EXPECT_TRUE(rollout_settings(directory_.path("none.jsonl")).is_null());
  EXPECT_EQ(std::distance(fs::directory_iterator(run()), {}), 2);  // no parts are left
}

TEST_F(RolloutDirectories, GoOnWhereARunWasKilled) {
  const std::string whole = whole_run();
  for (std::int64_t killed_after = 0; killed_after <= 12; ++killed_after) {
    fs::remove_all(run());
    if (killed_after < 12) {
      EXPECT_THROW(draw(*open(settings_), killed_after), Error);
    } else {
      // Killed when all is drawn and nothing merged.
      const auto directory = open(settings_);
      for (const RolloutTask& task : tasks_of_rank(directory->done(), kSamples, 0, 1)) {
        Rollout rollout = answer_to(task);
        rollout.id = fmt::format("p{}", task.problem);
        rollout.sample = task.sample;
        directory->append(rollout);
      }
    }
    if (killed_after > 0) {
      expect_error([&] { read_rollouts(run()); }, "is not finished");
    }
    const auto directory = open(settings_);
    EXPECT_EQ(std::ranges::count(directory->done(), 1), killed_after);
    EXPECT_EQ(draw(*directory).drawn, 12 - killed_after);
    EXPECT_EQ(merged(), whole) << killed_after;
  }
}

TEST_F(RolloutDirectories, CutOffATornLine) {
  const std::string whole = whole_run();
  EXPECT_THROW(draw(*open(settings_), 5), Error);
  std::ofstream(run() + "/part-0000.jsonl", std::ios::app) << R"({"id":"p0","sample":0,"answ)";
  std::ofstream(run() + "/part-0007.jsonl") << "{";  // of a rank that is no longer there
  EXPECT_EQ(draw(*open(settings_)).drawn, 7);
  EXPECT_EQ(merged(), whole);
}

TEST_F(RolloutDirectories, SurviveAKillWhileMerging) {
  draw(*open(settings_));
  const std::string whole = merged();
  // Merged, parts not yet removed.
  std::ofstream(run() + "/part-0001.jsonl") << whole.substr(0, whole.find('\n') + 1);
  EXPECT_EQ(draw(*open(settings_)).drawn, 0);
  EXPECT_EQ(merged(), whole);
  EXPECT_FALSE(fs::exists(run() + "/part-0001.jsonl"));
  // A finished run given again draws nothing.
  EXPECT_EQ(draw(*open(settings_)).drawn, 0);
  EXPECT_EQ(merged(), whole);
}

TEST_F(RolloutDirectories, RefuseOtherSettings) {
  EXPECT_THROW(draw(*open(settings_), 5), Error);
  const auto refused = [&](const Json& settings, const char* part) {
    expect_error([&] { open(settings); }, part);
  };
  refused({{"model", "n"}, {"seed", 1}}, "was made with model \"m\", now it is \"n\"");
  refused({{"model", "m"}, {"seed", 2}}, "was made with seed 1, now it is 2");
  refused({{"model", "m"}}, "was made with seed 1, now it is null");
  refused({{"model", "m"}, {"seed", 1}, {"top_k", 5}}, "was made with top_k null, now it is 5");
  EXPECT_EQ(draw(*open(settings_)).drawn, 7);  // nothing was lost
}

TEST_F(RolloutDirectories, NoteOtherCommits) {
  EXPECT_FALSE(open(settings_)->has_other_commits());
  EXPECT_FALSE(open(settings_)->has_other_commits());
  EXPECT_TRUE(open(settings_, "c2")->has_other_commits());
  const Json file = Json::parse(read_file(run() + "/run.json"));
  EXPECT_EQ(file["origins"], Json::array({{{"commit", "c1"}}, {{"commit", "c2"}}}));
}

TEST_F(RolloutDirectories, RefuseADirectoryThatIsInUse) {
  const auto first = open(settings_);
  expect_error([&] { open(settings_); }, "another run is writing");
}

TEST_F(RolloutDirectories, RefuseWhatIsNoRun) {
  fs::create_directories(run());
  std::ofstream(run() + "/notes.txt") << "mine";
  expect_error([&] { open(settings_); }, "holds files and is no run of rollouts");
  std::ofstream(run() + "/run.json") << "{}";
  expect_error([&] { open(settings_); }, "is no file of a run of rollouts");
  std::ofstream(run() + "/run.json") << R"({"format": "bifocal rollouts", "version": 2})";
  expect_error([&] { open(settings_); }, "has version 2");
  EXPECT_TRUE(fs::exists(run() + "/notes.txt"));
}

TEST_F(RolloutDirectories, RefuseBrokenParts) {
  const auto refused = [&](const std::string& line, const char* part) {
    fs::remove_all(run());
    open(settings_);
    std::ofstream(run() + "/part-0000.jsonl") << line << "\n";
    expect_error([&] { open(settings_); }, part);
    EXPECT_EQ(read_file(run() + "/part-0000.jsonl"), line + "\n");  // and leave them as they are
  };
  refused("{", "part-0000.jsonl:1");
  refused(rollout_line({.id = "p9"}), "sample 0 of problem p9, which was not asked for");
  refused(rollout_line({.id = "p1", .sample = 3}), "sample 3 of problem p1, which was not asked");
}

TEST_F(RolloutDirectories, RefuseARepeatedSampleAndAnEmptyFile) {
  const std::string line = rollout_line({.id = "p1", .sample = 1}) + "\n";
  std::ofstream(directory_.path("twice.jsonl")) << line << line;
  expect_error([&] { read_rollouts(directory_.path("twice.jsonl")); },
               "a second time sample 1 of problem p1");
  std::ofstream(directory_.path("empty.jsonl")) << "\n";
  expect_error([&] { read_rollouts(directory_.path("empty.jsonl")); }, "holds no sample");
  expect_error([&] { read_rollouts(directory_.path("missing.jsonl")); }, "cannot open");
}

}  // namespace
}  // namespace bifocal
