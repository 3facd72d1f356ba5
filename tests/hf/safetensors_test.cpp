// Safetensors: round trips, conversions, shards, and every malformed file.
#include "hf/safetensors.h"

#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <sys/stat.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "core/error.h"
#include "hf/hf_config.h"
#include "hf/hf_shapes.h"
#include "hf/model_tensors.h"
#include "support/error_of.h"

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
    return test::error_of([&] { const SafetensorsReader reader(directory_); });
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

// A header, the bytes of data behind it, and a part of the message that it must get; "" accepts.
struct Malformed {
  std::string header;
  std::size_t bytes;
  const char* reason;
};

#define EXPECT_REASON(message, reason)                                              \
  do {                                                                              \
    const std::string text = message;                                               \
    EXPECT_TRUE(text.empty() ? *(reason) == '\0'                                    \
                             : *(reason) != '\0' && text.find(reason) != text.npos) \
        << "got: " << text.substr(0, 300) << "\nwanted: " << (reason);              \
  } while (false)

TEST_F(Safetensors, RefusesMalformedDescriptions) {
  const auto one = [](const std::string& fields) { return "{\"a\":{" + fields + "}}"; };
  const std::string good = R"("dtype":"F32","shape":[2],"data_offsets":[0,8])";
  const std::string huge(1000000, '7');
  for (
      const Malformed& file : std::initializer_list<Malformed>{
          {one(good), 8, ""},
          {"{}", 0, ""},
          {one(R"("dtype":"F32","shape":[],"data_offsets":[0,4])"), 4, ""},
          {one(R"("dtype":"F32","shape":[0,3],"data_offsets":[0,0])"), 0, ""},
          {one(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), 8, "needs 8 bytes"},
          {one(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), 8, "needs 8 bytes"},
          {one(R"("dtype":"F32","shape":[2],"data_offsets":[-8,0])"), 8, "two whole numbers"},
          {one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8.0])"), 8, "two whole numbers"},
          {one(R"("dtype":"F32","shape":[2],"data_offsets":[0])"), 8, "two whole numbers"},
          {one(R"("dtype":"F32","shape":[2],"data_offsets":"all")"), 8, "two whole numbers"},
          {one(R"("dtype":"F32","shape":[2],"data_offsets":[18446744073709551608,18446744073709551615])"),
           8,
           "needs 8 bytes"},
          {one(R"("dtype":"F32","shape":[2],"data_offsets":[18446744073709551600,18446744073709551608])"),
           8,
           "begins at byte"},
          {one(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"), 8, "wanted whole sizes"},
          {one(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"), 8, "wanted whole sizes"},
          {one(R"("dtype":"F32","shape":2,"data_offsets":[0,8])"), 8, "wanted a shape"},
          {one(R"("dtype":"F32","shape":[1,1,1,1,2],"data_offsets":[0,8])"), 8, "at most 4"},
          {one(R"("dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,8])"),
           8,
           "too many elements"},
          {one(R"("dtype":"F32","shape":[)" + huge + R"(],"data_offsets":[0,8])"),
           8,
           "is not JSON"},
          {one(R"("dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8])"), 8, "type F8_E4M3 is not"},
          {one(R"("dtype":"BOOL","shape":[8],"data_offsets":[0,8])"), 8, "type BOOL is not"},
          {one(R"("dtype":7,"shape":[8],"data_offsets":[0,8])"), 8, "wanted dtype, shape"},
          {one(R"("shape":[2],"data_offsets":[0,8])"), 8, "wanted dtype, shape"},
          {one(R"("dtype":"F32","shape":[2])"), 8, "wanted dtype, shape"},
          {one(good + R"(,"dtype":"F32")"), 8, "names \"dtype\" twice"},
          {R"({"a":[0,8]})", 8, "wanted dtype, shape"},
          {R"({"a":7})", 8, "wanted dtype, shape"},
          {"{\"a\":{" + good + "},\"a\":{" + good + "}}", 8, "names \"a\" twice"}}) {
    EXPECT_REASON(refusal(file.header, file.bytes), file.reason);
  }
  const std::string number = one(R"("dtype":"F32","shape":[)" + huge + R"(],"data_offsets":[0,8])");
  EXPECT_LT(refusal(number, 8).size(), 1000U);
}

TEST_F(Safetensors, RefusesDataThatIsNotCoveredExactlyOnce) {
  const std::string a = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  const std::string b = R"(,"b":{"dtype":"F32","shape":[1],"data_offsets":)";
  const std::string empty = R"(,"b":{"dtype":"F32","shape":[0],"data_offsets":)";
  for (const Malformed& file : std::initializer_list<Malformed>{
           {a + "}", 7, "truncated"},
           {a + "}", 9, "the file has 9"},
           {a + b + "[8,12]}}", 12, ""},
           {a + b + "[4,8]}}", 8, "begins at byte 4 of the data, wanted 8"},      // overlap
           {a + b + "[12,16]}}", 16, "begins at byte 12 of the data, wanted 8"},  // hole
           {a + b + "[8,12]}}", 8, "describes 12 bytes of data"},                 // out of range
           {a + empty + "[8,8]}}", 8, ""},
           {a + empty + "[4,4]}}", 8, "begins at byte 4"}}) {
    EXPECT_REASON(refusal(file.header, file.bytes), file.reason);
  }
}

TEST_F(Safetensors, RefusesHeadersThatAreNoHeaders) {
  const std::string deep(100000, '[');
  for (const Malformed& file : std::initializer_list<Malformed>{
           {"{\"a\":", 8, "is not JSON"},
           {"[]", 0, "opening brace"},
           {" {}", 0, "opening brace"},
           {"", 8, "opening brace"},
           {"{\"a\":\"\xff\"}", 0, "is not JSON"},
           {"{}{}", 0, "is not JSON"},
           {std::string("{}\0 ", 4), 0, "NUL byte"},
           {"{\"a\":" + deep, 0, "more than 3 deep"},
           {"{\"a\":{\"b\":{\"c\":{}}}}", 0, "more than 3 deep"},
           {"{\"a\":{\"shape\":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1", 0, "more than 16 items"},
           {"{\"" + std::string(2000, 'a') + "\":{}}", 0, "a key of 2000 bytes"},
           {R"({"a\u0000b":{}})", 0, "holds a NUL"},
           {R"({"__metadata__":{"format":"pt","note":"anything"}})", 0, ""}}) {
    EXPECT_REASON(refusal(file.header, file.bytes), file.reason);
  }
  write_text("model.safetensors", "short");
  EXPECT_REASON(refusal(), "too few for a header");
  write_text("model.safetensors", "");
  EXPECT_REASON(refusal(), "too few for a header");
  write_text("model.safetensors", std::string("\xff\xff\xff\xff\xff\xff\xff\x7f{}", 10));
  EXPECT_REASON(refusal(), "over the limit of 100000000");
  write_text("model.safetensors", std::string("\x03\0\0\0\0\0\0\0{}", 10));
  EXPECT_REASON(refusal(), "the header takes 3 bytes, the file has 10");
  fs::remove(directory_ / "model.safetensors");
  EXPECT_REASON(refusal(), "has neither model.safetensors nor");
  ASSERT_EQ(::mkfifo((directory_ / "model.safetensors").c_str(), 0600), 0);
  EXPECT_REASON(refusal(), "is not a regular file");
  EXPECT_THROW(SafetensorsReader(directory_ / "absent"), Error);
}

// The format puts no tensor at an aligned place, so none is asked for.
TEST_F(Safetensors, ReadsDataAtAnyByte) {
  const std::string header =
      R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"F32","shape":[2],"data_offsets":[3,11]}})";
  const std::uint64_t length = header.size();
  const float values[] = {1.5F, -2.25F};
  std::string text(8, '\0');
  std::memcpy(text.data(), &length, 8);
  text += header + "xyz";
  text.append(reinterpret_cast<const char*>(values), sizeof values);
  write_text("model.safetensors", text);
  const SafetensorsReader reader(directory_);
  std::vector<float> same(2);
  std::vector<double> wide(2);
  reader.read("b", 0, {same.data(), DType::f32, {2}});
  reader.read("b", 0, {wide.data(), DType::f64, {2}});
  EXPECT_EQ(same, (std::vector<float>{1.5F, -2.25F}));
  EXPECT_EQ(wide, (std::vector<double>{1.5, -2.25}));
}

class SafetensorsIndex : public Safetensors {
 protected:
  void SetUp() override {
    Safetensors::SetUp();
    write_file("one.safetensors", kOne, 1);
    write_file("two.safetensors", R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1);
  }

  std::string index(const std::string& weights) const {
    write_text("model.safetensors.index.json", "{\"weight_map\":" + weights + "}");
    return refusal();
  }

  static constexpr const char* kOne = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
};

TEST_F(SafetensorsIndex, RefusesWhatDoesNotFitItsShards) {
  EXPECT_REASON(index(R"({"a":"one.safetensors","b":"two.safetensors"})"), "");
  EXPECT_REASON(index(R"({"a":"one.safetensors","b":"one.safetensors"})"),
                "tensor \"b\" is in one.safetensors, which lacks it");
  EXPECT_REASON(index(R"({"a":"one.safetensors","c":"two.safetensors"})"),
                "tensor \"c\" is in two.safetensors, which lacks it");
  EXPECT_REASON(index(R"({"a":"one.safetensors","b":"three.safetensors"})"), "three.safetensors");
  fs::copy_file(directory_ / "one.safetensors", directory_ / "copy.safetensors");
  EXPECT_REASON(index(R"({"a":"one.safetensors","b":"copy.safetensors"})"), "which one counts?");
  write_file("more.safetensors",
             R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
             R"("c":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
             2);
  EXPECT_REASON(index(R"({"a":"one.safetensors","b":"more.safetensors"})"),
                "holds tensor \"c\", which model.safetensors.index.json does not name");
  write_text("one.safetensors", "");
  EXPECT_REASON(index(R"({"a":"one.safetensors","b":"two.safetensors"})"), "too few for a header");
}

TEST_F(SafetensorsIndex, RefusesWhatIsNoIndex) {
  EXPECT_REASON(index(R"({"a":1})"), "tensor \"a\" has no file name");
  EXPECT_REASON(index("{}"), "wanted a weight_map");
  EXPECT_REASON(index("[]"), "wanted a weight_map");
  EXPECT_REASON(index(R"({"a":"one.safetensors","a":"two.safetensors"})"), "names \"a\" twice");
  EXPECT_REASON(index("{\"a\":" + std::string(100000, '[')), "more than 8 deep");
  write_text("model.safetensors.index.json", "weights");
  EXPECT_REASON(refusal(), "is not JSON");
  write_text("model.safetensors.index.json", "[]");
  EXPECT_REASON(refusal(), "wanted a JSON object");
  fs::resize_file(directory_ / "model.safetensors.index.json", 1U << 30U);  // sparse
  EXPECT_REASON(refusal(), "1073741824 bytes");
}

TEST_F(SafetensorsIndex, RefusesFilesOutsideItsDirectory) {
  const std::string outside = "../" + directory_.filename().string() + "/two.safetensors";
  const char* reason = "shards must be files of the same directory";
  EXPECT_REASON(index("{\"a\":\"one.safetensors\",\"b\":\"" + outside + "\"}"), reason);
  EXPECT_REASON(index("{\"a\":\"" + (directory_ / "one.safetensors").string() + "\"}"), reason);
  EXPECT_REASON(index(R"({"a":"..","b":"two.safetensors"})"), reason);
  EXPECT_REASON(index(R"({"a":".","b":"two.safetensors"})"), reason);
  EXPECT_REASON(index(R"({"a":"","b":"two.safetensors"})"), reason);
  EXPECT_REASON(index(R"({"a":"one.safetensors\u0000x"})"), reason);

  const fs::path elsewhere = directory_ / "elsewhere";
  fs::create_directories(elsewhere);
  fs::rename(directory_ / "one.safetensors", elsewhere / "one.safetensors");
  fs::create_symlink("elsewhere/one.safetensors", directory_ / "one.safetensors");
  const std::string both = R"({"a":"one.safetensors","b":"two.safetensors"})";
  EXPECT_REASON(index(both), "outside its directory: copy the file there");
  fs::remove(directory_ / "one.safetensors");
  fs::rename(elsewhere / "one.safetensors", directory_ / "other.safetensors");
  fs::create_symlink("other.safetensors", directory_ / "one.safetensors");
  EXPECT_REASON(index(both), "");  // a link that stays inside
  fs::remove(directory_ / "one.safetensors");
  fs::create_symlink("one.safetensors", directory_ / "one.safetensors");
  EXPECT_REASON(index(both), "cannot open");  // a link to itself
}

// The cache of Hugging Face's hub: snapshots of links into one folder of files.
TEST_F(SafetensorsIndex, ReadsTheLayoutOfTheHubsCache) {
  const fs::path snapshot = directory_ / "models--x--y/snapshots/0123abcd";
  const fs::path blobs = directory_ / "models--x--y/blobs";
  fs::create_directories(snapshot);
  fs::create_directories(blobs);
  for (const char* name : {"one.safetensors", "two.safetensors"}) {
    fs::rename(directory_ / name, blobs / name);
    fs::create_symlink(fs::path("../../blobs") / name, snapshot / name);
  }
  std::ofstream(snapshot / "model.safetensors.index.json")
      << R"({"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})";
  EXPECT_EQ(SafetensorsReader(snapshot).entries().size(), 2U);
}

class ModelTensors : public Safetensors {
 protected:
  static bool is_head(const SafetensorsWriter::Declaration& declaration) {
    return declaration.name == "lm_head.weight";
  }

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
      const std::vector<std::int64_t> zeros(values.size());
      const bool is_real = declaration.dtype == DType::f32 || declaration.dtype == DType::bf16;
      writer.write(declaration.name,
                   is_real ? ConstTensorView{values.data(), DType::f32, declaration.shape}
                           : ConstTensorView{zeros.data(), declaration.dtype, declaration.shape});
    }
    writer.finish();
    return test::error_of([&] { check_model_tensors(SafetensorsReader(directory_), table); });
  }
};

TEST_F(ModelTensors, AcceptsExactlyTheModel) {
  EXPECT_EQ(judge(false, [](auto&) {}), "");
  EXPECT_EQ(judge(true, [](auto&) {}), "");
}

TEST_F(ModelTensors, NamesMissingExtraAndMisshapenTensors) {
  EXPECT_REASON(judge(false, [](auto& all) { all.erase(all.begin() + 2); }),
                "lacks model.layers.0.self_attn.q_proj.weight");
  EXPECT_REASON(judge(false, [](auto& all) { all.erase(all.begin() + 2, all.begin() + 10); }),
                "and 5 more");
  EXPECT_REASON(judge(false, [](auto& all) { std::erase_if(all, is_head); }),
                "lacks lm_head.weight");
  for (const char* name : {"other",
                           "model.layers.2.mlp.up_proj.weight",
                           "model.layers.0.self_attn.o_proj.bias",
                           "model.layers.0.self_attn.q_norm.weight",
                           "model.layers.0.mixer.sink",
                           "rotary_emb.inv_freq.old",
                           "model.xrotary_emb.inv_freq"}) {
    EXPECT_REASON(judge(false,
                        [&](auto& all) {
                          all.push_back({name, DType::f32, {1}});
                        }),
                  (std::string("also holds ") + name).c_str());
  }
  EXPECT_REASON(judge(false,
                      [](auto& all) {
                        all[0].shape = {24, 50};
                      }),
                "model.embed_tokens.weight is float32 [24, 50], config.json asks for [50, 24]");
  EXPECT_REASON(judge(false, [](auto& all) { all[1].shape = {24, 1}; }), "asks for [24]");
}

TEST_F(ModelTensors, RefusesIntegers) {
  for (const DType type : {DType::i64, DType::i32, DType::u8}) {
    EXPECT_REASON(judge(false, [&](auto& all) { all[0].dtype = type; }),
                  "tensor model.embed_tokens.weight is");
  }
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
  EXPECT_EQ(judge(false, frequencies), "");
  for (const char* name : {"rotary_emb.inv_freq", "model.rotary_emb.inv_freq"}) {
    EXPECT_EQ(judge(true, [&](auto& all) { all.push_back({name, DType::f32, {2}}); }), "");
  }
  const char* reason = "lm_head.weight differs from it: set tie_word_embeddings to false";
  EXPECT_REASON(judge(true, head, 0.25F), reason);
  EXPECT_REASON(judge(true, narrow, 0.25F), reason);
  EXPECT_REASON(judge(true,
                      [](auto& all) {
                        all.push_back({"lm_head.weight", DType::f32, {24, 50}});
                      }),
                reason);
}

}  // namespace
}  // namespace bifocal
