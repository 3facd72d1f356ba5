// `bifocal plan` from outside: what it says of traffic and times.
#include <filesystem>
#include <fstream>
#include <unistd.h>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "support/program.h"

namespace bifocal {
namespace {

using test::Outcome;
using test::run_program;

const std::string kTiny = "plan --config '" BIFOCAL_SOURCE_DIR
                          "/configs/tiny/bifocal.toml' --teacher.path '" BIFOCAL_SOURCE_DIR
                          "/data/register-machine/teacher' ";

TEST(PlanCommand, TimesAreSumsOfTheirParts) {
  const std::string file =
      (std::filesystem::temp_directory_path() / fmt::format("bifocal_plan_{}.json", getpid()))
          .string();
  const Outcome outcome = run_program(kTiny +
                                      "--mesh.sequence 2 --ranks-per-node 1 --network 10 "
                                      "--run.device cuda --gpu a100 --evaluate.every 5 " +
                                      "--json " + file);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.text;
  for (const char* part : {"GPU-hours", "10 GB/s from other hosts", "mLSTM states", "Validation"}) {
    EXPECT_TRUE(outcome.says(part)) << part << "\n" << outcome.text;
  }
  std::ifstream stream(file);
  const nlohmann::json json = nlohmann::json::parse(stream);
  std::filesystem::remove(file);
  EXPECT_EQ(json.at("ranks"), 2);  // the mesh's
  EXPECT_GT(json.at("validation_bytes"), 0);
  const nlohmann::json& times = json.at("times");
  EXPECT_EQ(times.at("assumptions").at("network_bytes_per_second"), 10e9);
  ASSERT_EQ(times.at("stages").size(), 2U);
  for (std::size_t index = 0; index < 2; ++index) {
    const nlohmann::json& stage = times.at("stages").at(index);
    EXPECT_LE(json.at("validation_bytes"), json.at("stages").at(index).at("peak_bytes"));
    double seconds = 0.0;
    for (const nlohmann::json& part : stage.at("step_seconds_by_part")) {
      seconds += part.get<double>();
    }
    EXPECT_NEAR(stage.at("step_seconds"), seconds, 1e-12 * seconds);
    double traffic = 0.0;
    for (const nlohmann::json& one : stage.at("traffic")) {
      EXPECT_EQ(one.at("bytes_a_rank"), one.at("bytes_a_host")) << "a host has one rank";
      traffic += one.at("seconds").get<double>();
    }
    EXPECT_NEAR(stage.at("step_seconds_by_part").at("communication"), traffic, 1e-12 * traffic);
    const double steps = json.at("stages").at(index).at("steps");
    EXPECT_NEAR(stage.at("gpu_hours"), 2.0 * steps * seconds / 3600.0, 1e-9);
    EXPECT_NEAR(stage.at("days"), steps * seconds / 86400.0, 1e-9);
  }
}

TEST(PlanCommand, WithoutAGpuThereAreBytesAndNoTimes) {
  const Outcome outcome = run_program(kTiny + "--ranks 2");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.text;
  EXPECT_TRUE(outcome.says("links in a step, distill")) << outcome.text;
  EXPECT_TRUE(outcome.says("name the GPU")) << outcome.text;
  EXPECT_FALSE(outcome.says("seconds")) << outcome.text;
}

TEST(PlanCommand, AskedForRanksWhereTheMeshLeavesThemOpen) {
  const Outcome open = run_program(kTiny);
  EXPECT_EQ(open.exit_code, 1);
  EXPECT_TRUE(open.says("wanted --ranks")) << open.text;
  EXPECT_EQ(run_program(kTiny + "--ranks 2 --gpu b100").exit_code, 2);
}

TEST(PlanCommand, TimesAreThoseOfBfloat16OnGpusAlone) {
  for (const char* change : {"", "--run.device cuda --run.dtype float32 "}) {
    const Outcome outcome = run_program(kTiny + "--ranks 2 --gpu h200 " + change);
    EXPECT_EQ(outcome.exit_code, 1) << change;
    EXPECT_TRUE(outcome.says("--gpu knows times of bfloat16")) << outcome.text;
  }
  EXPECT_EQ(run_program(kTiny + "--ranks 2 --link 100").exit_code, 2) << "--link without --gpu";
}

}  // namespace
}  // namespace bifocal
