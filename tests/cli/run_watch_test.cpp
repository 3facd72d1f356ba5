// Runs of the program that signals end, and what status and report make of them.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/file.h"
#include "support/program.h"
#include "support/temporary_directory.h"

namespace bifocal::test {

namespace {

namespace fs = std::filesystem;

const std::string kMachine = std::string(BIFOCAL_SOURCE_DIR) + "/data/register-machine/";

class RunWatch : public ::testing::Test {
 protected:
  void SetUp() override {
    const Outcome made = run_program(
        "synth register-machine --count 300 --max-steps 6 --seed 1 "
        "--output " +
        path("problems.jsonl"));
    ASSERT_EQ(made.exit_code, 0) << made.text;
    const Outcome packed =
        run_program("tokenize " + path("problems.jsonl") + " --tokenizer " + kMachine +
                    "teacher/tokenizer.json --held-out 0.2 --output " + path("data"));
    ASSERT_EQ(packed.exit_code, 0) << packed.text;
  }

  std::string path(const std::string& name) const { return directory_.path(name); }

  // Two stages with validations, a few hundred tokens a step.
  std::vector<std::string> words(const std::string& run) const {
    return {"train",
            "--run.directory",
            path(run),
            "--teacher.path",
            kMachine + "teacher",
            "--student.budget",
            "144",
            "--data.train",
            path("data"),
            "--data.row_tokens",
            "256",
            "--data.rows_per_step",
            "1",
            "--align.steps",
            "4",
            "--distill.steps",
            "6",
            "--evaluate.every",
            "3",
            "--evaluate.rows",
            "2",
            "--run.peak_tflops",
            "0.1"};
  }

  Outcome train(const std::string& run) const {
    std::string line;
    for (const std::string& word : words(run)) {
      line += word + " ";
    }
    return run_program(line);
  }

  std::vector<nlohmann::json> lines(const std::string& run) const {
    std::ifstream file(path(run) + "/metrics.jsonl");
    std::vector<nlohmann::json> objects;
    for (std::string line; std::getline(file, line);) {
      const auto object = nlohmann::json::parse(line, nullptr, false);
      if (object.is_object()) {
        objects.push_back(object);
      }
    }
    return objects;
  }

  std::size_t step_lines(const std::string& run) const {
    return static_cast<std::size_t>(std::ranges::count_if(
        lines(run), [](const auto& line) { return !line.contains("event"); }));
  }

  // Starts the run, sends the signal once it has logged a step more, and returns its exit code.
  int train_and_signal(const std::string& run, int signal) const {
    const std::size_t before = step_lines(run);
    const std::vector<std::string> arguments = words(run);
    const pid_t child = ::fork();
    if (child == 0) {
      std::vector<char*> argv{const_cast<char*>(BIFOCAL_BINARY)};
      for (const std::string& argument : arguments) {
        argv.push_back(const_cast<char*>(argument.c_str()));
      }
      argv.push_back(nullptr);
      ::dup2(::open("/dev/null", O_WRONLY), 1);
      ::execv(BIFOCAL_BINARY, argv.data());
      ::_exit(127);
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(120);
    while (step_lines(run) <= before && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    ::kill(child, signal);
    int status = 0;
    pid_t ended = ::waitpid(child, &status, WNOHANG);
    while (ended == 0 && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      ended = ::waitpid(child, &status, WNOHANG);
    }
    if (ended == 0) {  // it hangs
      ::kill(child, SIGKILL);
      ended = ::waitpid(child, &status, 0);
    }
    EXPECT_EQ(ended, child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  TemporaryDirectory directory_;
};

// The lines that do not depend on when the process lived.
std::vector<nlohmann::json> timeless(std::vector<nlohmann::json> lines) {
  std::erase_if(lines, [](const auto& line) {
    const std::string event = line.value("event", "");
    return event == "stopped" || event == "checkpoint";
  });
  for (nlohmann::json& line : lines) {
    for (const char* key : {"seconds", "tokens_per_second", "memory_bytes", "mfu"}) {
      line.erase(key);
    }
  }
  return lines;
}

TEST_F(RunWatch, SignalsSaveAndExitWith75AndTheRunGoesOnAsIfNothingHadBeen) {
  std::size_t stops = 0;
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1}) {
    ASSERT_EQ(train_and_signal("parts", signal), 75);
    const auto all = lines("parts");
    ++stops;
    EXPECT_EQ(static_cast<std::size_t>(std::ranges::count_if(
                  all, [](const auto& line) { return line.value("event", "") == "stopped"; })),
              stops);
    EXPECT_EQ(all.back().at("event"), "stopped");
    EXPECT_TRUE(fs::exists(path("parts") + "/checkpoints/step_" +
                           std::to_string(all.back().at("step").get<int>()) + "/manifest.json"));
  }
  EXPECT_EQ(train("parts").exit_code, 0);
  ASSERT_EQ(train("whole").exit_code, 0);
  EXPECT_EQ(timeless(lines("parts")), timeless(lines("whole")));
}

TEST_F(RunWatch, MetricsHoldValidationsGatesAndSpeed) {
  const Outcome trained = train("run");
  ASSERT_EQ(trained.exit_code, 0) << trained.text;
  EXPECT_TRUE(trained.says("held out: KL ")) << trained.text;
  EXPECT_TRUE(trained.says("  MFU ")) << trained.text;
  std::vector<int> validated;
  for (const auto& line : lines("run")) {
    if (!line.contains("event")) {
      EXPECT_GT(line.at("memory_bytes").get<double>(), 0.0);
      EXPECT_GT(line.at("mfu").get<double>(), 0.0);
      EXPECT_EQ(line.at("skipped_steps"), 0);
      continue;
    }
    if (line.at("event") != "validation") {
      continue;
    }
    validated.push_back(line.at("step").get<int>());
    EXPECT_GT(line.at("kl").get<double>(), 0.0);
    EXPECT_EQ(line.at("gate_means").size(), 4U);
    EXPECT_EQ(line.at("far_shares").size(), 4U);
    double tokens = 0.0;
    for (const auto& bucket : line.at("by_position")) {
      tokens += bucket.at("tokens").get<double>();
    }
    EXPECT_EQ(tokens, line.at("tokens").get<double>());
  }
  // Every third step, and the end of each stage.
  EXPECT_EQ(validated, (std::vector<int>{3, 4, 6, 9, 10}));
  EXPECT_FALSE(fs::is_empty(path("run") + "/events"));
}

TEST_F(RunWatch, StatusAndReportShowTheRun) {
  ASSERT_EQ(train("run").exit_code, 0);
  std::ofstream(path("run") + "/metrics.jsonl", std::ios::app)
      << R"({"step": 10, "stage": "distill", "stage_step": 6, "event": "spike", "loss": 9.5, )"
      << R"("mean": 1.0, "deviation": 0.5})"
      << "\n{\"step\": 11, \"sta";  // half a line
  const Outcome status = run_program("status " + path("run"));
  EXPECT_EQ(status.exit_code, 0) << status.text;
  for (const char* part : {"finished: distill, step 6 of 6 (100.0 %), 10 over all stages",
                           "tokens/s",
                           "MFU",
                           "held out",
                           "step 10",
                           "loss 9.50000 stands out",
                           "the end"}) {
    EXPECT_TRUE(status.says(part)) << part << "\n" << status.text;
  }

  const Outcome report = run_program("report " + path("run") + " --output " + path("page.html"));
  EXPECT_EQ(report.exit_code, 0) << report.text;
  const std::string page = read_file(path("page.html"));
  for (const char* part : {"<title>",
                           "prefers-color-scheme: dark",
                           "aria-label=\"Loss\"",
                           "aria-label=\"KL to the teacher, nats a token\"",
                           "aria-label=\"Alignment loss by layer and step\"",
                           "aria-label=\"Gate mean by layer and step\"",
                           "aria-label=\"Far branch&#39;s share by layer and step\"",
                           "aria-label=\"Held-out KL by position in the document\"",
                           "aria-label=\"Peak memory of rank 0, GiB\"",
                           "loss 9.50000 stands out",
                           "budget = 144"}) {
    EXPECT_NE(page.find(part), std::string::npos) << part;
  }
  // Nothing is fetched and nothing runs.
  for (const char* part : {"http:", "https:", "<script", "<link", "src=", "@import", "url("}) {
    EXPECT_EQ(page.find(part), std::string::npos) << part;
  }
}

TEST_F(RunWatch, StatusAndReportRefuseWhatIsNoRun) {
  for (const char* command : {"status ", "report "}) {
    const Outcome outcome = run_program(command + path("data"));
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(outcome.says("wanted a run directory")) << outcome.text;
  }
  fs::create_directories(path("new"));
  std::ofstream(path("new") + "/config.toml") << "# <b>\n";
  const Outcome status = run_program("status " + path("new"));
  EXPECT_EQ(status.exit_code, 0) << status.text;
  EXPECT_TRUE(status.says("no step is logged yet")) << status.text;
  const Outcome report = run_program("report " + path("new"));
  EXPECT_EQ(report.exit_code, 0) << report.text;
  EXPECT_NE(read_file(path("new") + "/report.html").find("# &lt;b&gt;"), std::string::npos);
}

}  // namespace

}  // namespace bifocal::test
