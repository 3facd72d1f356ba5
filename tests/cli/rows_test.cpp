// Mixtures from outside: the report on rows, training on them, and what a changed mixture does to a
// run that would continue.
#include <string>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/file.h"
#include "support/program.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

// Two tokenised sources and a mixture of them.
class TwoSources : public ::testing::Test {
 protected:
  void SetUp() override {
    make_source("short", "--count 200 --max-steps 3");
    make_source("long", "--count 40 --min-steps 10 --max-steps 20");
    write_mixture("3");
  }

  void make_source(const std::string& name, const std::string& options) const {
    const std::string lines = directory_.path(name + ".jsonl");
    for (const std::string& command :
         {"synth register-machine " + options + " --seed 1 --output " + lines,
          "tokenize " + lines + " --vocabulary 128 --held-out 0.1 --output " +
              directory_.path(name)}) {
      const test::Outcome outcome = test::run_program(command);
      ASSERT_EQ(outcome.exit_code, 0) << outcome.text;
    }
  }

  void write_mixture(const std::string& weight) const {
    write_file_atomically(directory_.path("mixture.toml"),
                          "[[source]]\nname = \"short\"\npaths = \"short\"\nweight = " + weight +
                              "\n[[source]]\nname = \"long\"\npaths = \"long\"\nweight = 1\n");
  }

  test::Outcome run(const std::string& command) const {
    return test::run_program(command + " --data.mixture " + directory_.path("mixture.toml"));
  }

  test::TemporaryDirectory directory_;
};

TEST_F(TwoSources, AreReportedAsTableAndJson) {
  const test::Outcome outcome =
      run("rows --rows 200 --data.row_tokens 512 --json " + directory_.path("report.json"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.text;
  for (const char* part : {"200 rows of 512 tokens", "short", "long", "75.00 %", "256 to 511"}) {
    EXPECT_TRUE(outcome.says(part)) << part << "\n" << outcome.text;
  }
  const auto json = nlohmann::json::parse(read_file(directory_.path("report.json")));
  EXPECT_EQ(json["rows"], 200);
  EXPECT_NEAR(json["sources"][0]["share"].get<double>(), 0.75, 0.01);
  const test::Outcome held_out = run("rows --held-out --rows 1 --data.row_tokens 512");
  EXPECT_TRUE(held_out.says("1 rows of 512 tokens")) << held_out.text;
}

TEST_F(TwoSources, AreRefusedBesideAPlainList) {
  const test::Outcome outcome = run("rows --data.train x");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(outcome.says("[config] data.train and data.mixture both name data")) << outcome.text;
  const test::Outcome none = test::run_program("rows");
  EXPECT_EQ(none.exit_code, 1);
  EXPECT_TRUE(none.says("set data.train or data.mixture")) << none.text;
}

TEST_F(TwoSources, AreWhatARunMayBeContinuedWith) {
  const std::string train =
      "pretrain --student.preset keep --data.row_tokens 512 --data.rows_per_step 1 --student.init "
      "\"" BIFOCAL_SOURCE_DIR "/data/register-machine/teacher\" --run.directory " +
      directory_.path("run") + " --pretrain.steps ";
  const test::Outcome first = run(train + "1");
  EXPECT_EQ(first.exit_code, 0) << first.text;
  EXPECT_TRUE(first.says("data: short 75.0 % of the tokens")) << first.text;
  EXPECT_TRUE(first.says("data so far: 1 rows")) << first.text;
  const std::string metrics = read_file(directory_.path("run/metrics.jsonl"));
  const auto line = nlohmann::json::parse(metrics.substr(0, metrics.find('\n')));  // the step's
  EXPECT_EQ(line["data"]["rows"], 1);
  EXPECT_TRUE(line["data"]["sources"].contains("long"));

  EXPECT_TRUE(run(train + "1").says("resumed from"));
  for (const char* change : {"--data.long drop", "--data.seed 5"}) {
    const test::Outcome other = run(train + "1 " + change);
    EXPECT_EQ(other.exit_code, 1);
    EXPECT_TRUE(other.says("another model, teacher, data or run.dtype")) << change << "\n"
                                                                         << other.text;
  }
  write_mixture("3.5");
  const test::Outcome changed = run(train + "1");
  EXPECT_EQ(changed.exit_code, 1);
  EXPECT_TRUE(changed.says("another model, teacher, data or run.dtype")) << changed.text;
}

}  // namespace
}  // namespace bifocal
