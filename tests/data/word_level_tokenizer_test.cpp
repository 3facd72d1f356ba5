// WordLevel tokenizers: words, white space, and the files that are refused.
#include "data/word_level_tokenizer.h"

#include <fstream>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

using Ids = std::vector<std::int32_t>;
using Json = nlohmann::json;

const std::vector<std::string> kWords{"set", "r1", "#10", "<end>", "\xC3\xA9t\xC3\xA9"};

class WordLevel : public ::testing::Test {
 protected:
  WordLevelTokenizer read(const Json& json) const {
    std::ofstream(directory_.path("tokenizer.json")) << json.dump();
    return WordLevelTokenizer::read(directory_.path());
  }

  Json plain() const {
    return {{"pre_tokenizer", {{"type", "WhitespaceSplit"}}},
            {"model", {{"type", "WordLevel"}, {"vocab", {{"a", 0}, {"b", 1}}}}}};
  }

  void write_words() const {
    Json json = plain();
    json["model"]["vocab"] = Json::object();
    for (std::size_t id = 0; id < kWords.size(); ++id) {
      json["model"]["vocab"][kWords[id]] = id;
    }
    std::ofstream(directory_.path("tokenizer.json")) << json.dump();
  }

  // What the reader says about the plain file with one change; empty where it accepts.
  std::string refusal(const char* pointer, const Json& value) const {
    Json json = plain();
    json[Json::json_pointer(pointer)] = value;
    try {
      read(json);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  test::TemporaryDirectory directory_;
};

TEST_F(WordLevel, ReadsAFileOrItsDirectory) {
  write_words();
  for (const std::string& path : {directory_.path(), directory_.path("tokenizer.json")}) {
    const WordLevelTokenizer tokenizer = WordLevelTokenizer::read(path);
    EXPECT_EQ(tokenizer.words(), kWords);
    EXPECT_EQ(tokenizer.vocabulary(), 5);
    EXPECT_EQ(tokenizer.find("#10"), 2);
    EXPECT_EQ(tokenizer.find("#1"), std::nullopt);
    EXPECT_EQ(tokenizer.encode("set r1 <end>"), (Ids{0, 1, 3}));
    EXPECT_EQ(tokenizer.decode(Ids{0, 1, 3}), "set r1 <end>");
    EXPECT_EQ(tokenizer.decode({}), "");
  }
}

TEST_F(WordLevel, AnyWhiteSpacePartsWords) {
  write_words();
  const WordLevelTokenizer tokenizer = WordLevelTokenizer::read(directory_.path());
  EXPECT_EQ(tokenizer.encode("  set\t\nr1\r\n "), (Ids{0, 1}));
  EXPECT_EQ(tokenizer.encode("set\xC2\xA0r1\xE3\x80\x80\xC3\xA9t\xC3\xA9"), (Ids{0, 1, 4}));
  EXPECT_EQ(tokenizer.encode(" \n"), Ids{});
  EXPECT_EQ(tokenizer.encode(""), Ids{});
}

TEST_F(WordLevel, UnknownWordsNeedAnUnknownToken) {
  EXPECT_THROW(read(plain()).encode("a c"), Error);
  Json json = plain();
  json["model"]["unk_token"] = "b";
  EXPECT_EQ(read(json).encode("a c"), (Ids{0, 1}));
  json["model"]["unk_token"] = "<unk>";  // not in the vocabulary
  EXPECT_THROW(read(json).encode("a c"), Error);
  EXPECT_THROW(read(plain()).decode(Ids{2}), Error);
  EXPECT_THROW(read(plain()).decode(Ids{-1}), Error);
}

TEST_F(WordLevel, OtherTokenizersAreRefusedByName) {
  EXPECT_EQ(refusal("/normalizer", nullptr), "");
  EXPECT_EQ(refusal("/added_tokens", Json::array()), "");
  const std::tuple<const char*, Json, const char*> changes[] = {
      {"/model/type", "BPE", "BPE"},
      {"/pre_tokenizer/type", "Whitespace", "Whitespace"},
      {"/pre_tokenizer", nullptr, "null"},
      {"/normalizer", {{"type", "NFC"}}, "NFC"},
      {"/post_processor", {{"type", "TemplateProcessing"}}, "TemplateProcessing"},
      {"/decoder", {{"type", "ByteLevel"}}, "ByteLevel"},
      {"/added_tokens", {{{"id", 0}, {"content", "a"}}}, "added_tokens"},
      {"/model/vocab/b", 0, "id 0"},
      {"/model/vocab/b", 2, "id 2"},
      {"/model/vocab/b", -1, "id -1"},
      {"/model/vocab", Json::object(), "empty"}};
  for (const auto& [pointer, value, named] : changes) {
    EXPECT_NE(refusal(pointer, value).find(named), std::string::npos) << pointer;
  }
  EXPECT_NE(refusal("/model", nullptr), "");
  EXPECT_THROW(WordLevelTokenizer::read(directory_.path("absent.json")), Error);
}

}  // namespace
}  // namespace bifocal
