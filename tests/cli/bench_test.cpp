// `bifocal bench` at tiny sizes: every row is there, is a time, and stands in the results file.
#include <fstream>
#include <map>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/file.h"
#include "support/program.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

using nlohmann::json;
using test::Outcome;
using test::run_program;
using test::TemporaryDirectory;

// Rows by name.
std::map<std::string, json> rows_of(const json& results) {
  std::map<std::string, json> rows;
  for (const json& row : results.at("rows")) {
    EXPECT_TRUE(rows.emplace(row.at("name"), row).second) << row;
    EXPECT_GT(row.at("ours"), 0.0) << row;
    EXPECT_LE(row.at("low"), row.at("ours")) << row;
    EXPECT_GE(row.at("high"), row.at("ours")) << row;
  }
  return rows;
}

json read_json(const std::string& path) {
  return json::parse(read_file(path));
}

TEST(Bench, OpsHaveTimesFloorsAndTheirPeers) {
  const TemporaryDirectory directory;
  const std::string file = directory.path("ops.json");
  const std::string peers = directory.path("peers.json");
  std::ofstream(peers) << R"({"rows": [
      {"name": "rms_norm", "unit": "s", "peer": 0.25, "peer_name": "another"},
      {"name": "unknown", "unit": "s", "peer": 1.0}]})";
  const Outcome outcome =
      run_program(fmt::format("bench ops --model tiny --data.row_tokens 64 --documents 24 "
                              "--window 8 --student.budget 64 --warmups 1 --repeats 3 --json {} "
                              "--peer {} --notes \"a note\" --peak-tflops 1 --bandwidth-tbs 0.1",
                              file,
                              peers));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.text;
  const json results = read_json(file);
  EXPECT_EQ(results.at("what"), "bench ops");
  EXPECT_EQ(results.at("notes"), "a note");
  EXPECT_NE(results.at("command").get<std::string>().find("bench ops --model tiny"),
            std::string::npos);
  for (const char* key : {"commit", "date", "machine"}) {
    EXPECT_FALSE(results.at(key).get<std::string>().empty()) << key;
  }
  const std::map<std::string, json> rows = rows_of(results);
  for (const char* name : {"linear_qkv",
                           "linear_down_backward",
                           "teacher_attention",
                           "swa8_forward",
                           "swa8_forward_backward",
                           "mlstm_forward",
                           "mlstm_forward_backward",
                           "feature_maps",
                           "feature_maps_backward",
                           "kl_head",
                           "adamw",
                           "rms_norm",
                           "rms_norm_backward",
                           "swiglu",
                           "swiglu_backward",
                           "rope",
                           "gate",
                           "gate_backward",
                           "embedding",
                           "embedding_backward"}) {
    ASSERT_TRUE(rows.contains(name)) << name;
    EXPECT_TRUE(outcome.says(name));
    EXPECT_EQ(rows.at(name).at("unit"), "ms");
    EXPECT_EQ(rows.at(name).at("samples"), 3);
    EXPECT_GT(rows.at(name).at("floor"), 0.0);
    EXPECT_GT(rows.at(name).at("bytes_per_second"), 0.0);
    EXPECT_EQ(rows.at(name).contains("peer"), std::string(name) == "rms_norm") << name;
  }
  EXPECT_EQ(rows.at("rms_norm").at("peer"), 250.0);  // in our row's unit
  EXPECT_EQ(rows.at("rms_norm").at("peer_name"), "another");
  // 64 rows of 32 float32 read and written, and the weight read, at 0.1 TB/s.
  EXPECT_NEAR(rows.at("rms_norm").at("floor").get<double>(), (2 * 64 * 32 + 32) * 4 / 1e8, 1e-9);
}

TEST(Bench, OnlyRunsWhatIsAskedFor) {
  const Outcome outcome = run_program(
      "bench ops --model tiny --data.row_tokens 16 --repeats 1 --only swiglu --only rope");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.text;
  EXPECT_TRUE(outcome.says("swiglu_backward"));
  EXPECT_TRUE(outcome.says("rope"));
  EXPECT_FALSE(outcome.says("kl_head"));
}

TEST(Bench, StepsOfBothStagesWithTheirPartsAndMemory) {
  const TemporaryDirectory directory;
  const std::string file = directory.path("step.json");
  const Outcome outcome = run_program(
      fmt::format("bench step --model tiny --data.row_tokens 96 --documents 40 --student.budget 32 "
                  "--warmups 1 --repeats 2 --memory.logit_chunk 32 --memory.recompute block "
                  "--json {}",
                  file));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.text;
  const std::map<std::string, json> rows = rows_of(read_json(file));
  for (const char* stage : {"align", "step"}) {
    const std::string name = fmt::format("{}_bifocal_packed", stage);
    double parts = 0.0;
    for (const char* part : {"rows",
                             "teacher_forward",
                             "student_forward",
                             "head_and_loss",
                             "student_backward",
                             "gradients",
                             "optimizer"}) {
      ASSERT_TRUE(rows.contains(name + "_" + part)) << name << " " << part << outcome.text;
      parts += rows.at(name + "_" + part).at("ours").get<double>();
    }
    ASSERT_TRUE(rows.contains(name));
    // Medians of two are means, and means of parts add up.
    EXPECT_NEAR(parts, rows.at(name).at("ours").get<double>(), 1e-9);
    EXPECT_NEAR(
        rows.at(name + "_rate").at("ours").get<double>() * rows.at(name).at("ours").get<double>(),
        96.0,
        1e-6);
    EXPECT_TRUE(rows.contains(name + "_mfu"));
  }
  EXPECT_TRUE(rows.contains("teacher_forward_packed"));
  double regions = 0.0;
  for (const char* region :
       {"weights", "teacher_weights", "gradients", "optimizer", "activations", "loss"}) {
    const std::string name = std::string("memory_bifocal_packed_") + region;
    ASSERT_TRUE(rows.contains(name)) << name;
    regions += rows.at(name).at("ours").get<double>();
  }
  // Regions need not peak together.
  EXPECT_LE(rows.at("memory_bifocal_packed").at("ours"), regions);
}

TEST(Bench, AStudentWithNothingToAlignHasOneStage) {
  const Outcome outcome = run_program(
      "bench step --model tiny --data.row_tokens 48 --student.preset swa_sink_tokens "
      "--student.budget 16 --warmups 0 --repeats 1");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.text;
  EXPECT_TRUE(outcome.says("step_swa_sink_tokens_48"));
  EXPECT_FALSE(outcome.says("align_"));
}

TEST(Bench, DecodesAfterPromptsOfSeveralLengths) {
  const TemporaryDirectory directory;
  const std::string file = directory.path("decode.json");
  const Outcome outcome = run_program(
      fmt::format("bench decode --model tiny --student bifocal --student swa_learned_sink "
                  "--student teacher --prompt 30 --prompt 1024 --tokens 4 --student.budget 32 "
                  "--warmups 0 --repeats 2 --json {}",
                  file));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.text;
  const std::map<std::string, json> rows = rows_of(read_json(file));
  for (const char* student : {"bifocal", "swa", "teacher"}) {
    for (const char* length : {"30", "1k"}) {
      const std::string suffix = fmt::format("tiny_{}_{}", student, length);
      ASSERT_TRUE(rows.contains("decode_" + suffix)) << suffix << outcome.text;
      EXPECT_EQ(rows.at("decode_" + suffix).at("unit"), "tokens/s");
      EXPECT_EQ(rows.at("prefill_" + suffix).at("unit"), "s");
    }
  }
  EXPECT_TRUE(rows.contains("prefill_ratio_tiny_30"));
  EXPECT_TRUE(rows.contains("prefill_ratio_tiny_1k"));
}

TEST(Bench, RefusesWhatItCannotMeasure) {
  const Outcome model = run_program("bench ops --model nowhere");
  EXPECT_EQ(model.exit_code, 1);
  EXPECT_TRUE(model.says("wanted a model as qwen3-4b")) << model.text;
  const TemporaryDirectory directory;
  const std::string peers = directory.path("peers.json");
  std::ofstream(peers) << R"({"rows": [{"name": "rms_norm", "unit": "ms"}]})";
  const Outcome peer =
      run_program(fmt::format("bench ops --model tiny --only rope --peer {}", peers));
  EXPECT_EQ(peer.exit_code, 1);
  EXPECT_TRUE(peer.says("wanted rows with name, unit and peer")) << peer.text;
  EXPECT_EQ(run_program("bench").exit_code, 2);
}

}  // namespace
}  // namespace bifocal
