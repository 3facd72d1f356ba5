// An exported model: its files, and that what is loaded again is what was written.
#include "hf/export.h"

#include <fstream>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/file.h"
#include "core/random.h"
#include "hf/hf_config.h"
#include "hf/hf_shapes.h"
#include "hf/model_card.h"
#include "hf/model_tensors.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

namespace fs = std::filesystem;

class Export : public ::testing::Test {
 protected:
  Export() {
    fs::create_directories(directory_.path("teacher"));
    write("teacher/tokenizer.json", "{\"a\": 1}");
    write("teacher/LICENSE", "\n  Some Licence 1.0\nrest\n");
    auto json = testing::tiny_qwen2();
    json["eos_token_id"] = 7;
    options_.model = parse_hf_config(json.dump(), "test");
    options_.model.mixers = make_mixers("bifocal", 16, {"1:window=full"}, options_.model);
    options_.teacher = directory_.path("teacher");
    options_.tokenizer = options_.teacher;
    options_.output = directory_.path("student");
    options_.dtype = DType::f32;
    options_.origin = "trained, 12 optimiser steps";
    options_.commit = "abc123";
    options_.configuration = "[run]\nseed = 3\n";
  }

  void write(const std::string& name, const std::string& text) const {
    std::ofstream(directory_.path(name)) << text;
  }

  ConstTensorView provide(const Parameter& parameter) {
    elements_.resize(static_cast<std::size_t>(parameter.size()));
    for (std::size_t i = 0; i < elements_.size(); ++i) {
      elements_[i] = static_cast<float>(random_normal(1, stream_of(parameter.name), i));
    }
    return {elements_.data(), DType::f32, parameter.shape};
  }

  void export_it() {
    export_model(options_, [this](const Parameter& parameter) { return provide(parameter); });
  }

  test::TemporaryDirectory directory_;
  ExportOptions options_;
  std::vector<float> elements_;
};

TEST_F(Export, LoadsAsTheSameModel) {
  export_it();
  const ModelConfig model = read_hf_config(options_.output);
  EXPECT_EQ(model.mixers, options_.model.mixers);
  const ParameterTable table(model);
  const SafetensorsReader reader(options_.output);
  EXPECT_NO_THROW(check_model_tensors(reader, table));
  for (const Parameter& parameter : table.parameters()) {
    std::vector<float> read(static_cast<std::size_t>(parameter.size()));
    reader.read(parameter.name, 0, {read.data(), DType::f32, parameter.shape});
    provide(parameter);
    EXPECT_EQ(read, elements_) << parameter.name;
  }
}

TEST_F(Export, StoresBfloat16WhereAsked) {
  options_.dtype = DType::bf16;
  export_it();
  const SafetensorsReader reader(options_.output);
  EXPECT_EQ(reader.at("model.norm.weight").dtype, DType::bf16);
  EXPECT_EQ(nlohmann::json::parse(read_file(options_.output / "config.json"))["dtype"], "bfloat16");
  const Parameter parameter = ParameterTable(options_.model).at("model.norm.weight");
  std::vector<float> read(24);
  reader.read(parameter.name, 0, {read.data(), DType::f32, {24}});
  provide(parameter);
  for (std::size_t i = 0; i < read.size(); ++i) {
    EXPECT_EQ(read[i], to_float(to_bfloat16(elements_[i])));
  }
}

TEST_F(Export, PassesOnTheTokenizerAndMakesAGenerationConfig) {
  export_it();
  EXPECT_EQ(read_file(options_.output / "tokenizer.json"), "{\"a\": 1}");
  EXPECT_FALSE(fs::exists(options_.output / "merges.txt"));
  const auto generation =
      nlohmann::json::parse(read_file(options_.output / "generation_config.json"));
  EXPECT_EQ(generation["eos_token_id"], 7);
  EXPECT_FALSE(generation.contains("bos_token_id"));
}

TEST_F(Export, CarriesThePythonFilesOfTheSourceTree) {
  export_it();
  const auto json = nlohmann::json::parse(read_file(options_.output / "config.json"));
  ASSERT_EQ(json["auto_map"].size(), 2U);
  for (const char* name : {"configuration_bifocal.py", "cache_bifocal.py", "modeling_bifocal.py"}) {
    EXPECT_EQ(read_file(options_.output / name),
              read_file(fs::path(BIFOCAL_SOURCE_DIR) / "src/hf/python" / name));
  }
  EXPECT_NE(read_file(options_.output / "README.md").find("trust_remote_code=True"),
            std::string::npos);
}

TEST_F(Export, OfFullAttentionNeedsNoCode) {
  options_.model.mixers.assign(2, MixerSettings{});
  export_it();
  EXPECT_FALSE(fs::exists(options_.output / "modeling_bifocal.py"));
  EXPECT_FALSE(
      nlohmann::json::parse(read_file(options_.output / "config.json")).contains("auto_map"));
  EXPECT_EQ(read_file(options_.output / "README.md").find("trust_remote_code"), std::string::npos);
}

// AutoTokenizer knows no class for the model type, so the directory must name one.
TEST_F(Export, NamesATokenizerClassWhereTheTeacherDoesNot) {
  const auto exported = [&] {
    fs::remove_all(options_.output);
    export_it();
    return read_file(options_.output / "tokenizer_config.json");
  };
  EXPECT_EQ(nlohmann::json::parse(exported())["tokenizer_class"], "PreTrainedTokenizerFast");
  write("teacher/tokenizer_config.json", R"({"model_max_length": 9, "tokenizer_class": null})");
  const auto completed = nlohmann::json::parse(exported());
  EXPECT_EQ(completed["tokenizer_class"], "PreTrainedTokenizerFast");
  EXPECT_EQ(completed["model_max_length"], 9);
  const std::string own = R"({"tokenizer_class":  "Qwen2Tokenizer"})";
  write("teacher/tokenizer_config.json", own);
  EXPECT_EQ(exported(), own);
  fs::remove(directory_.path("teacher/tokenizer.json"));
  fs::remove(directory_.path("teacher/tokenizer_config.json"));
  fs::remove_all(options_.output);
  export_it();
  EXPECT_FALSE(fs::exists(options_.output / "tokenizer_config.json"));
}

TEST_F(Export, CutsShardsWhereAsked) {
  options_.shard_bytes = 4000;
  export_it();
  EXPECT_TRUE(fs::exists(options_.output / "model.safetensors.index.json"));
  EXPECT_FALSE(fs::exists(options_.output / "model.safetensors"));
  const SafetensorsReader reader(options_.output);
  EXPECT_NO_THROW(check_model_tensors(reader, ParameterTable(options_.model)));
}

TEST_F(Export, KeepsTheTeachersGenerationConfig) {
  write("teacher/generation_config.json", "{\"top_p\": 0.8}");
  export_it();
  EXPECT_EQ(read_file(options_.output / "generation_config.json"), "{\"top_p\": 0.8}");
}

TEST_F(Export, CardStatesTeacherLicenceMixersAndConfiguration) {
  export_it();
  const std::string card = read_file(options_.output / "README.md");
  for (const char* part : {"# student\n",
                           "Teacher: teacher\n",
                           "Some Licence 1.0",
                           "abc123",
                           "| 0 | window 12, learned sink, states per key-value head, gate |",
                           "| 1 | full attention |",
                           "12 optimiser steps",
                           "seed = 3"}) {
    EXPECT_NE(card.find(part), std::string::npos) << part << " in\n" << card;
  }
}

TEST_F(Export, LicenceComesFromTheFrontMatterFirst) {
  EXPECT_EQ(stated_licence(options_.teacher), "Some Licence 1.0");
  write("teacher/README.md", "---\nlanguage: en\nlicense: apache-2.0\n---\n# Model\n");
  EXPECT_EQ(stated_licence(options_.teacher), "apache-2.0");
  write("teacher/README.md", "# Model\nlicense: mit\n");
  EXPECT_EQ(stated_licence(options_.teacher), "Some Licence 1.0");
  fs::remove(directory_.path("teacher/LICENSE"));
  EXPECT_EQ(stated_licence(options_.teacher), "");
  export_it();
  EXPECT_NE(read_file(options_.output / "README.md").find("not stated in the teacher's directory"),
            std::string::npos);
}

TEST_F(Export, RefusesADirectoryInUse) {
  fs::create_directories(options_.output);
  EXPECT_NO_THROW(export_it());  // empty
  EXPECT_THROW(export_it(), Error);
  options_.output = directory_.path("teacher/LICENSE");
  EXPECT_THROW(export_it(), Error);
}

TEST_F(Export, LeavesNothingBehindWhenItFails) {
  EXPECT_THROW(export_model(options_,
                            [](const Parameter& parameter) -> ConstTensorView {
                              throw Error("no " + parameter.name);
                            }),
               Error);
  options_.dtype = DType::f64;
  EXPECT_THROW(export_it(), Error);
  options_.dtype = DType::f32;
  options_.teacher = directory_.path("absent");
  EXPECT_THROW(export_it(), Error);
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_.path()), fs::directory_iterator()), 1);
}

}  // namespace
}  // namespace bifocal
