// Safetensors: round trips, conversions, shards, and every malformed file.
#include "hf/safetensors.h"

#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <unistd.h>

#include <gtest/gtest.h>

#include "core/error.h"
#include "hf/hf_config.h"
#include "hf/hf_shapes.h"
#include "hf/model_tensors.h"

namespace bifocal {
namespace {

namespace fs = std::filesystem;

class Safetensors : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    directory_ = fs::temp_directory_path() /
                 (std::string("bifocal_") + info->name() + "_" + std::to_string(::getpid()));
    fs::create_directories(directory_);
  }

  void TearDown() override { fs::remove_all(directory_); }

  void write_text(const std::string& name, const std::string& text) const {
    std::ofstream(directory_ / name, std::ios::binary) << text;
  }

  // A file of a header and `bytes` of zeros.
  void write_file(const std::string& name, const std::string& header, std::size_t bytes) const {
    const std::uint64_t length = header.size();
    std::string text(8, '\0');
    std::memcpy(text.data(), &length, 8);
    write_text(name, text + header + std::string(bytes, '\0'));
  }

  // What the reader says about a single file with this header; empty where it accepts.
  std::string refusal(const std::string& header, std::size_t bytes) const {
    write_file("model.safetensors", header, bytes);
    return refusal();
  }

  std::string refusal() const {
    try {
      const SafetensorsReader reader(directory_);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  fs::path directory_;
};

TEST_F(Safetensors, WritesWhatItReads) {
  std::vector<float> matrix{1.0F, -2.5F, 3.25F, 0.0F, 1e-20F, 1e20F};
  std::vector<double> vector{0.1, -0.2};
  SafetensorsWriter writer(directory_, {{"a", DType::f32, {2, 3}}, {"b", DType::f64, {2}}});
  writer.write("a", {matrix.data(), DType::f32, {2, 3}});
  writer.write("b", {vector.data(), DType::f64, {2}});
  EXPECT_FALSE(fs::exists(directory_ / "model.safetensors"));
  writer.finish();
  const SafetensorsReader reader(directory_);
  ASSERT_EQ(reader.entries().size(), 2U);
  EXPECT_EQ(reader.at("a").shape, (Shape{2, 3}));
  EXPECT_EQ(reader.at("a").dtype, DType::f32);
  std::vector<float> read(6);
  reader.read("a", 0, {read.data(), DType::f32, {6}});
  EXPECT_EQ(read, matrix);
  std::vector<double> slice(1);
  reader.read("b", 1, {slice.data(), DType::f64, {1}});
  EXPECT_EQ(slice[0], -0.2);
  EXPECT_THROW(reader.read("b", 1, {vector.data(), DType::f64, {2}}), Error);
  EXPECT_THROW(reader.read("b", -1, {vector.data(), DType::f64, {2}}), Error);
  EXPECT_THROW(reader.at("c"), Error);
}

TEST_F(Safetensors, HeaderIsPaddedToEightBytes) {
  const float value = 1.0F;
  for (const char* name : {"a", "ab", "abc", "abcd", "abcde"}) {
    SafetensorsWriter writer(directory_, {{name, DType::f32, {1}}});
    writer.write(name, {&value, DType::f32, {1}});
    writer.finish();
    std::ifstream file(directory_ / "model.safetensors", std::ios::binary);
    std::uint64_t length = 0;
    file.read(reinterpret_cast<char*>(&length), 8);
    EXPECT_EQ(length % 8, 0U);
    std::string header(length, ' ');
    file.read(header.data(), static_cast<std::streamsize>(length));
    EXPECT_EQ(nlohmann::json::parse(header)["__metadata__"]["format"], "pt");
  }
}

TEST_F(Safetensors, ConvertsBetweenFloatingTypes) {
  const std::vector<double> values{0.0, -1.0, 0.333251953125, 65504.0, 1.00390625};
  for (const DType stored : {DType::bf16, DType::f16, DType::f32, DType::f64}) {
    SafetensorsWriter writer(directory_, {{"x", stored, {5}}});
    writer.write("x", {values.data(), DType::f64, {5}});
    writer.finish();
    const SafetensorsReader reader(directory_);
    std::vector<double> wide(5);
    std::vector<float> narrow(5);
    reader.read("x", 0, {wide.data(), DType::f64, {5}});
    reader.read("x", 0, {narrow.data(), DType::f32, {5}});
    for (std::size_t i = 0; i < 5; ++i) {
      const auto value = static_cast<float>(values[i]);
      const double wanted = stored == DType::bf16  ? to_float(to_bfloat16(value))
                            : stored == DType::f16 ? to_float(to_float16(value))
                                                   : values[i];
      EXPECT_EQ(wide[i], wanted) << name_of(stored) << " " << i;
      EXPECT_EQ(narrow[i], static_cast<float>(wanted));
    }
  }
}

TEST_F(Safetensors, IntegersAreReadAsTheirOwnTypeOnly) {
  const std::vector<std::int64_t> values{1, -2};
  SafetensorsWriter writer(directory_, {{"x", DType::i64, {2}}});
  writer.write("x", {values.data(), DType::i64, {2}});
  writer.finish();
  const SafetensorsReader reader(directory_);
  std::vector<std::int64_t> same(2);
  reader.read("x", 0, {same.data(), DType::i64, {2}});
  EXPECT_EQ(same, values);
  std::vector<float> other(2);
  EXPECT_THROW(reader.read("x", 0, {other.data(), DType::f32, {2}}), Error);
}

TEST_F(Safetensors, LargeModelsAreShardedWithAnIndex) {
  const std::vector<float> values(10, 2.0F);
  SafetensorsWriter writer(directory_,
                           {{"a", DType::f32, {10}},
                            {"b", DType::f32, {10}},
                            {"c", DType::f32, {5}},
                            {"d", DType::f32, {5}}},
                           60);
  writer.write("a", {values.data(), DType::f32, {10}});
  writer.write("b", {values.data(), DType::f32, {10}});
  writer.write("c", {values.data(), DType::f32, {5}});
  writer.write("d", {values.data(), DType::f32, {5}});
  writer.finish();
  EXPECT_TRUE(fs::exists(directory_ / "model-00001-of-00003.safetensors"));
  EXPECT_FALSE(fs::exists(directory_ / "model.safetensors"));
  std::ifstream file(directory_ / "model.safetensors.index.json");
  const auto index = nlohmann::json::parse(file);
  EXPECT_EQ(index["metadata"]["total_size"], 120);
  EXPECT_EQ(index["weight_map"]["c"], "model-00002-of-00003.safetensors");
  EXPECT_EQ(index["weight_map"]["d"], "model-00003-of-00003.safetensors");
  const SafetensorsReader reader(directory_);
  EXPECT_EQ(reader.entries().size(), 4U);
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()), 4);
}

TEST_F(Safetensors, UnfinishedWriterLeavesNothing) {
  const float value = 1.0F;
  {
    SafetensorsWriter writer(directory_, {{"a", DType::f32, {1}}, {"b", DType::f32, {1}}});
    EXPECT_THROW(writer.write("b", {&value, DType::f32, {1}}), Error);
    writer.write("a", {&value, DType::f32, {1}});
    EXPECT_THROW(writer.finish(), Error);
  }
  EXPECT_TRUE(fs::is_empty(directory_));
}

TEST_F(Safetensors, RefusesMalformedFiles) {
  const std::string a = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  EXPECT_EQ(refusal(a + "}", 8), "");
  EXPECT_EQ(refusal("{}", 0), "");
  EXPECT_NE(refusal(a + "}", 7), "");  // truncated
  EXPECT_NE(refusal(a + "}", 9), "");  // trailing bytes
  EXPECT_NE(refusal(a, 8), "");        // broken JSON
  EXPECT_NE(refusal("[]", 0), "");
  const char* others[] = {
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})",  // shape and range disagree
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})",
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}})",
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})",
      R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})",
      R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})",
      R"({"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})",
      R"({"a":{"dtype":"F32","shape":[1,1,1,1,2],"data_offsets":[0,8]}})",
      R"({"a":{"dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8]}})",
      R"({"a":{"dtype":7,"shape":[8],"data_offsets":[0,8]}})",
      R"({"a":{"shape":[2],"data_offsets":[0,8]}})",
      R"({"a":[0,8]})",
      R"({"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,8]}})",  // overflow
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})"};
  for (const char* header : others) {
    EXPECT_NE(refusal(header, 8), "") << header;
  }
  const std::string b = R"(,"b":{"dtype":"F32","shape":[1],"data_offsets":)";
  EXPECT_EQ(refusal(a + b + "[8,12]}}", 12), "");
  EXPECT_NE(refusal(a + b + "[4,8]}}", 8), "");     // overlap
  EXPECT_NE(refusal(a + b + "[12,16]}}", 16), "");  // hole
  write_text("model.safetensors", "short");
  EXPECT_NE(refusal(), "");
  write_text("model.safetensors", "");
  EXPECT_NE(refusal(), "");
  write_text("model.safetensors", std::string("\xff\xff\xff\xff\xff\xff\xff\x7f{}", 10));
  EXPECT_NE(refusal().find("limit"), std::string::npos);
  fs::remove(directory_ / "model.safetensors");
  EXPECT_NE(refusal(), "");
  EXPECT_THROW(SafetensorsReader(directory_ / "absent"), Error);
}

TEST_F(Safetensors, RefusesMalformedIndexes) {
  write_file("one.safetensors", R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1);
  write_file("two.safetensors", R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1);
  const auto index = [this](const std::string& weights) {
    write_text("model.safetensors.index.json", "{\"weight_map\":" + weights + "}");
    return refusal();
  };
  EXPECT_EQ(index(R"({"a":"one.safetensors","b":"two.safetensors"})"), "");
  EXPECT_NE(index(R"({"a":"one.safetensors","b":"one.safetensors"})"), "");
  EXPECT_NE(index(R"({"a":"one.safetensors","c":"two.safetensors"})"), "");
  EXPECT_NE(index(R"({"a":"one.safetensors","b":"three.safetensors"})"), "");
  const std::string outside = "../" + directory_.filename().string() + "/two.safetensors";
  EXPECT_NE(index("{\"a\":\"one.safetensors\",\"b\":\"" + outside + "\"}"), "");
  EXPECT_NE(index("{\"a\":\"" + (directory_ / "one.safetensors").string() + "\"}"), "");
  EXPECT_NE(index(R"({"a":"..","b":"two.safetensors"})"), "");
  EXPECT_NE(index(R"({"a":1})"), "");
  EXPECT_NE(index("{}"), "");
  EXPECT_NE(index("[]"), "");
  fs::copy_file(directory_ / "one.safetensors", directory_ / "copy.safetensors");
  EXPECT_NE(index(R"({"a":"one.safetensors","b":"copy.safetensors"})"), "");
}

class ModelTensors : public Safetensors {
 protected:
  // Writes a checkpoint of the tiny Qwen2 (tied where asked), changed by `change`.
  std::string judge(bool is_tied,
                    const std::function<void(std::vector<SafetensorsWriter::Declaration>&)>& change,
                    float head_value = 0.5F) const {
    auto json = testing::tiny_qwen2();
    json["tie_word_embeddings"] = is_tied;
    const ParameterTable table(parse_hf_config(json.dump(), "test"));
    std::vector<SafetensorsWriter::Declaration> declarations;
    for (const Parameter& parameter : table.parameters()) {
      declarations.push_back({parameter.name, DType::f32, parameter.shape});
    }
    change(declarations);
    SafetensorsWriter writer(directory_, declarations);
    for (const auto& declaration : declarations) {
      const float value = declaration.name == "lm_head.weight" ? head_value : 0.5F;
      const std::vector<float> values(static_cast<std::size_t>(declaration.shape.size()), value);
      writer.write(declaration.name, {values.data(), DType::f32, declaration.shape});
    }
    writer.finish();
    try {
      check_model_tensors(SafetensorsReader(directory_), table);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
};

TEST_F(ModelTensors, AcceptsExactlyTheModel) {
  EXPECT_EQ(judge(false, [](auto&) {}), "");
  EXPECT_EQ(judge(true, [](auto&) {}), "");
}

TEST_F(ModelTensors, NamesMissingExtraAndMisshapenTensors) {
  EXPECT_NE(judge(false, [](auto& all) { all.erase(all.begin() + 2); })
                .find("model.layers.0.self_attn.q_proj.weight"),
            std::string::npos);
  EXPECT_NE(judge(false,
                  [](auto& all) {
                    all.push_back({"other", DType::f32, {1}});
                  })
                .find("other"),
            std::string::npos);
  EXPECT_NE(judge(false, [](auto& all) { all[0].shape = {24, 50}; }), "");
}

TEST_F(ModelTensors, AcceptsEqualHeadsAndInverseFrequencies) {
  const auto head = [](auto& all) { all.push_back({"lm_head.weight", DType::f32, {50, 24}}); };
  const auto narrow = [](auto& all) { all.push_back({"lm_head.weight", DType::bf16, {50, 24}}); };
  const auto frequencies = [](auto& all) {
    all.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", DType::f32, {2}});
  };
  EXPECT_EQ(judge(true, head), "");
  EXPECT_EQ(judge(true, narrow), "");
  EXPECT_EQ(judge(true, frequencies), "");
  EXPECT_NE(judge(true, head, 0.25F), "");
  EXPECT_NE(judge(true, narrow, 0.25F), "");
}

}  // namespace
}  // namespace bifocal
