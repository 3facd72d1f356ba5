// `bifocal merge` from outside: the average of students, and what it refuses.
#include <filesystem>

#include <gtest/gtest.h>

#include "core/random.h"
#include "hf/export.h"
#include "hf/hf_config.h"
#include "hf/hf_shapes.h"
#include "hf/safetensors.h"
#include "support/program.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

namespace fs = std::filesystem;
using test::Outcome;
using test::run_program;

class Merge : public ::testing::Test {
 protected:
  Merge() { fs::create_directories(directory_.path("teacher")); }

  std::string path(const std::string& name) const { return directory_.path(name); }

  // A student with random float32 weights from a seed.
  void make_student(const std::string& name, std::uint64_t seed, const std::string& preset) {
    ExportOptions options;
    options.model = parse_hf_config(testing::tiny_qwen2().dump(), "test");
    options.model.mixers = make_mixers(preset, 16, {}, options.model);
    options.teacher = directory_.path("teacher");
    options.tokenizer = options.teacher;
    options.output = directory_.path(name);
    options.dtype = DType::f32;
    std::vector<float> values;
    export_model(options, [&](const Parameter& parameter) -> ConstTensorView {
      values.resize(static_cast<std::size_t>(parameter.size()));
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>(random_normal(seed, stream_of(parameter.name), i));
      }
      return {values.data(), DType::f32, parameter.shape};
    });
  }

  std::vector<float> values_of(const SafetensorsReader& reader, const std::string& name) const {
    std::vector<float> values(static_cast<std::size_t>(reader.at(name).shape.size()));
    reader.read(name, 0, {values.data(), DType::f32, {static_cast<std::int64_t>(values.size())}});
    return values;
  }

  test::TemporaryDirectory directory_;
};

TEST_F(Merge, EveryTensorIsTheWeightedAverage) {
  make_student("a", 1, "bifocal");
  make_student("b", 2, "bifocal");
  make_student("c", 3, "bifocal");
  const Outcome outcome =
      run_program("merge " + path("a") + " " + path("b") + " " + path("c") +
                  " --weights 0.5,0.75,-0.25 --dtype float32 --output " + path("merged"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.text;
  const SafetensorsReader a(directory_.path("a"));
  const SafetensorsReader b(directory_.path("b"));
  const SafetensorsReader c(directory_.path("c"));
  const SafetensorsReader merged(directory_.path("merged"));
  ASSERT_EQ(merged.entries().size(), a.entries().size());
  for (const auto& [name, entry] : a.entries()) {
    const std::vector<float> x = values_of(a, name);
    const std::vector<float> y = values_of(b, name);
    const std::vector<float> z = values_of(c, name);
    const std::vector<float> got = values_of(merged, name);
    for (std::size_t i = 0; i < x.size(); ++i) {
      // Summed in double and rounded once, so the same expression gives the same bits.
      const double sum = 0.5 * x[i] + 0.75 * y[i] + -0.25 * z[i];
      ASSERT_EQ(got[i], static_cast<float>(sum)) << name << " " << i;
    }
  }
  EXPECT_EQ(read_hf_config(directory_.path("merged")).mixers,
            read_hf_config(directory_.path("a")).mixers);
}

TEST_F(Merge, AStudentMergedWithItselfIsItself) {
  make_student("a", 1, "swa_learned_sink");
  const Outcome outcome = run_program("merge " + path("a") + " " + path("a") +
                                      " --dtype float32 --output " + path("merged"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.text;
  const SafetensorsReader a(directory_.path("a"));
  const SafetensorsReader merged(directory_.path("merged"));
  for (const auto& [name, entry] : a.entries()) {
    EXPECT_EQ(values_of(a, name), values_of(merged, name)) << name;
  }
}

TEST_F(Merge, RefusesWhatHasNoAverage) {
  make_student("a", 1, "bifocal");
  make_student("b", 2, "bifocal");
  make_student("other", 3, "bifocal_query");

  struct Case {
    std::string arguments, message;
  };

  const std::string pair = path("a") + " " + path("b");
  for (const Case& refused : {
           Case{path("a"), "wanted at least two students, got 1"},
           Case{pair + " --weights 0.5", "wanted one --weights value for each of 2 students"},
           Case{pair + " --weights 0.5,0.6", "wanted --weights that sum to 1"},
           Case{pair + " --weights nan,1", "wanted finite --weights"},
           Case{path("a") + " " + path("other"), "only equal mixers average"},
           Case{path("a") + " " + path("absent"), "absent"},
       }) {
    const Outcome outcome =
        run_program("merge " + refused.arguments + " --output " + path("merged"));
    EXPECT_EQ(outcome.exit_code, 1) << refused.arguments;
    EXPECT_TRUE(outcome.says(refused.message)) << refused.arguments << ": " << outcome.text;
    EXPECT_FALSE(fs::exists(directory_.path("merged"))) << refused.arguments;
  }
}

}  // namespace
}  // namespace bifocal
