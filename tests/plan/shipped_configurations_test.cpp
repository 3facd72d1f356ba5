// Every configuration that comes with the project can be run as it stands, on each machine that it
// is meant for.
#include <filesystem>

#include <gtest/gtest.h>

#include "config/read.h"
#include "hf/hf_config.h"
#include "hf/hf_shapes.h"
#include "plan/plan.h"

namespace bifocal {
namespace {

namespace fs = std::filesystem;

const fs::path kConfigs = fs::path(BIFOCAL_SOURCE_DIR) / "configs";

ModelConfig teacher_of(const RunConfig& config) {
  const std::string name = fs::path(config.teacher.path).filename();
  if (name == "Qwen3-4B-Instruct-2507") {
    return parse_hf_config(testing::qwen3_4b().dump(), name);
  }
  if (name == "SmolLM2-135M-Instruct") {
    return parse_hf_config(testing::smollm2_135m().dump(), name);
  }
  return read_hf_config((fs::path(BIFOCAL_SOURCE_DIR) / config.teacher.path).string());
}

Plan plan_of(const std::vector<std::string>& files, int ranks) {
  PlanInputs inputs{.config = read_run_config(files), .ranks = ranks, .ranks_per_node = 8};
  inputs.teacher = teacher_of(inputs.config);
  inputs.student = *inputs.teacher;
  inputs.student.mixers = make_mixers(inputs.config.student.preset,
                                      inputs.config.student.budget,
                                      inputs.config.student.mixers,
                                      *inputs.teacher);
  inputs.teacher_storage = DType::bf16;
  return make_plan(inputs);
}

std::vector<std::string> students_in(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(kConfigs / folder)) {
    files.push_back(entry.path().string());
  }
  return files;
}

TEST(ShippedConfigurations, SmallOnesCanBePlannedOnOneAndTwoRanks) {
  for (const char* folder : {"tiny", "smollm2-135m", "smollm2-135m-cpu"}) {
    for (const std::string& file : students_in(folder)) {
      for (const int ranks : {1, 2}) {
        SCOPED_TRACE(file);
        EXPECT_FALSE(plan_of({file}, ranks).stages.empty());
      }
    }
  }
}

TEST(ShippedConfigurations, TheArticlesStudentsFitTheirMachines) {
  struct Machine {
    const char* file;
    MeshCounts mesh;
  };

  const std::vector<std::string> students = students_in("qwen3-4b");
  EXPECT_EQ(students.size(), 4U);
  for (const auto& [file, mesh] : {Machine{"1xh200.toml", {1, 1}},
                                   Machine{"8x80gb.toml", {8, 1}},
                                   Machine{"64x80gb.toml", {8, 8}}}) {
    for (const std::string& student : students) {
      SCOPED_TRACE(student + " on " + file);
      const int ranks = static_cast<int>(mesh.data * mesh.sequence);
      const Plan plan = plan_of({student, (kConfigs / "machines" / file).string()}, ranks);
      EXPECT_EQ(plan.mesh.data, mesh.data);
      EXPECT_EQ(plan.mesh.sequence, mesh.sequence);
      std::int64_t tokens = 0;
      for (const PlannedStage& stage : plan.stages) {
        tokens += stage.tokens;
      }
      EXPECT_EQ(tokens, 12500LL * 8 * 40960);  // the article's, whatever the machine
    }
  }
}

}  // namespace
}  // namespace bifocal
