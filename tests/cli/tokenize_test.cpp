// `bifocal tokenize` from outside: interrupted, killed, twice at once, out of space.
#include <array>
#include <chrono>
#include <csignal>
#include <fcntl.h>
#include <filesystem>
#include <map>
#include <string>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/file.h"
#include "core/random.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

class TokenizeProgram : public testing::Test {
 protected:
  TokenizeProgram() {
    std::string text;
    for (std::int64_t i = 0; i < 6000; ++i) {
      text += fmt::format("{{\"ids\": [{}", i);
      for (std::uint64_t at = 0; at < 100; ++at) {
        text += fmt::format(", {}", random_below(9000, 3, static_cast<std::uint64_t>(i), at));
      }
      text += "]}\n";
    }
    write_file_atomically(input_, text);
  }

  // Starts the program; its output goes to log_.
  pid_t start(const Words& arguments, rlim_t largest_file = RLIM_INFINITY) const {
    const pid_t child = fork();
    if (child == 0) {
      const int log = open(log_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
      dup2(log, STDOUT_FILENO);
      dup2(log, STDERR_FILENO);
      const rlimit limit{largest_file, largest_file};
      if (largest_file != RLIM_INFINITY) {
        setrlimit(RLIMIT_FSIZE, &limit);
        std::signal(SIGXFSZ, SIG_IGN);  // a write then fails as on a full disk
      }
      std::vector<char*> words = {const_cast<char*>("bifocal"), const_cast<char*>("tokenize")};
      for (const std::string& argument : arguments) {
        words.push_back(const_cast<char*>(argument.c_str()));
      }
      words.push_back(nullptr);
      execv(BIFOCAL_BINARY, words.data());
      _exit(127);
    }
    return child;
  }

  // The exit code, or minus the signal that ended it.
  static int wait(pid_t child) {
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  int run(const Words& arguments) const { return wait(start(arguments)); }

  Words arguments(const std::string& input) const {
    return {input,
            "--output",
            out_,
            "--vocabulary",
            "9000",
            "--shard-tokens",
            "50000",
            "--threads",
            "2"};
  }

  std::string log() const { return read_file(log_); }

  std::map<std::string, std::string> published() const {
    std::map<std::string, std::string> bytes;
    for (const auto& entry : fs::directory_iterator(out_)) {
      bytes[entry.path().filename().string()] = read_file(entry.path());
    }
    return bytes;
  }

  // A pipe that the program reads; open for writing once it does.
  int open_pipe(const std::string& path) const {
    EXPECT_EQ(mkfifo(path.c_str(), 0600), 0);
    return open(path.c_str(), O_RDWR | O_CLOEXEC);  // does not wait for the reader
  }

  void wait_for(const std::string& path) const {
    for (int i = 0; i < 2000 && !fs::exists(path); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    ASSERT_TRUE(fs::exists(path)) << path;
  }

  test::TemporaryDirectory directory_;
  std::string input_ = directory_.path("in.jsonl");
  std::string out_ = directory_.path("out");
  std::string log_ = directory_.path("log");
};

TEST_F(TokenizeProgram, KilledAtAnyMomentItLeavesNothingThatTheNextRunMinds) {
  ASSERT_EQ(run(arguments(input_)), 0) << log();
  const auto wanted = published();
  EXPECT_GT(wanted.size(), 10U);
  fs::remove_all(out_);
  int killed = 0;
  for (std::uint64_t trial = 0; trial < 10; ++trial) {
    const pid_t child = start(arguments(input_));
    const std::string partial = out_ + ".partial";
    // Half of the trials aim at the time in which shards are written.
    if (trial % 2 == 0) {
      wait_for(partial);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random_below(60000, 11, 0, trial)));
    kill(child, SIGKILL);
    const int code = wait(child);
    if (fs::exists(out_)) {
      EXPECT_TRUE(published() == wanted) << "trial " << trial;
      fs::remove_all(out_);
    }
    killed += code == -SIGKILL ? 1 : 0;
  }
  EXPECT_GE(killed, 3);
  ASSERT_EQ(run(arguments(input_)), 0) << log();
  EXPECT_TRUE(published() == wanted);
  EXPECT_FALSE(fs::exists(out_ + ".partial"));
}

TEST_F(TokenizeProgram, SignalsStopItAndRemoveWhatWasBegun) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const std::string pipe = directory_.path(fmt::format("pipe{}", signal));
    const int writer = open_pipe(pipe);
    const pid_t child = start(arguments(pipe));
    wait_for(out_ + ".partial/.lock");
    kill(child, signal);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    close(writer);  // what would feed the pipe was interrupted too
    EXPECT_EQ(wait(child), 1);
    EXPECT_NE(log().find("stopped before the end"), std::string::npos) << log();
    EXPECT_FALSE(fs::exists(out_));
    EXPECT_FALSE(fs::exists(out_ + ".partial"));
  }
}

TEST_F(TokenizeProgram, ASecondRunIsRefusedAndDoesNotDisturbTheFirst) {
  const std::string pipe = directory_.path("pipe");
  const int writer = open_pipe(pipe);
  const pid_t first = start(arguments(pipe));
  wait_for(out_ + ".partial/.lock");
  EXPECT_EQ(run(arguments(input_)), 1);
  EXPECT_NE(log().find("another run is writing"), std::string::npos) << log();
  const std::string line = "{\"ids\": [1, 2, 3]}\n";
  EXPECT_EQ(write(writer, line.data(), line.size()), static_cast<ssize_t>(line.size()));
  close(writer);
  EXPECT_EQ(wait(first), 0);
  EXPECT_EQ(published().size(), 1U);
}

TEST_F(TokenizeProgram, WithoutSpaceNothingIsPublished) {
  constexpr rlim_t kBytes = 100000;  // less than a shard
  EXPECT_EQ(wait(start(arguments(input_), kBytes)), 1);
  EXPECT_NE(log().find("train-00000.h5: File too large: make space"), std::string::npos) << log();
  EXPECT_FALSE(fs::exists(out_));
  EXPECT_FALSE(fs::exists(out_ + ".partial"));
}

TEST_F(TokenizeProgram, WritesItsReportAndStaysQuietWithoutATerminal) {
  Words words = arguments(input_);
  words.insert(words.end(), {"--json", directory_.path("report.json")});
  ASSERT_EQ(run(words), 0) << log();
  const auto report = nlohmann::json::parse(read_file(directory_.path("report.json")));
  EXPECT_EQ(report["total"]["documents"], 6000);
  EXPECT_EQ(report["total"]["tokens"], 606000);
  EXPECT_EQ(report["sources"][0]["name"], input_);
  EXPECT_NE(log().find("606,000"), std::string::npos);
  EXPECT_EQ(log().find('\r'), std::string::npos);
  EXPECT_EQ(log().find("left"), std::string::npos);
}

}  // namespace
}  // namespace bifocal
