// What a tokenizer.json may not ask for: refused by name.
#include <fstream>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "data/tokenizer.h"
#include "data/word_level_tokenizer.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

using Json = nlohmann::json;

class TokenizerRefusals : public ::testing::Test {
 protected:
  TokenizerRefusals() {
    std::ifstream file(BIFOCAL_SOURCE_DIR "/tests/data/tokenizers/llama3/tokenizer.json");
    json_ = Json::parse(file);
  }

  std::string refusal_of(const std::string& text) const {
    std::ofstream(directory_.path("tokenizer.json")) << text;
    try {
      read_tokenizer(directory_.path());
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  // What the reader says about the fixture with one change; empty where it accepts.
  std::string refusal(const char* pointer, const Json& value) const {
    Json json = json_;
    json[Json::json_pointer(pointer)] = value;
    return refusal_of(json.dump());
  }

  Json split(const char* pattern) const {
    return {{"type", "Split"},
            {"pattern", {{"Regex", pattern}}},
            {"behavior", "Isolated"},
            {"invert", false}};
  }

  Json json_;
  test::TemporaryDirectory directory_;
};

TEST_F(TokenizerRefusals, WhatChangesNoIdsIsAccepted) {
  const std::tuple<const char*, Json> changes[] = {
      {"/normalizer", {{"type", "NFC"}}},
      {"/normalizer", {{"type", "Sequence"}, {"normalizers", Json::array()}}},
      {"/model/dropout", 0.0},
      {"/model/unk_token", "!"},  // every byte has a token
      {"/model/fuse_unk", true},
      {"/model/continuing_subword_prefix", ""},
      {"/post_processor", nullptr},
      {"/pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}}};
  for (const auto& [pointer, value] : changes) {
    EXPECT_EQ(refusal(pointer, value), "") << pointer;
  }
  Json old = json_;
  old["model"].erase("type");
  EXPECT_EQ(refusal_of(old.dump()), "");
}

TEST_F(TokenizerRefusals, OtherKindsAreNamed) {
  const Json byte_level{{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  const Json suffixed{
      {"type", "TemplateProcessing"},
      {"single", {{{"Sequence", {{"id", "A"}}}}, {{"SpecialToken", {{"id", "<end>"}}}}}},
      {"special_tokens", {{"<end>", {{"ids", {3}}}}}}};
  Json merged = split("a");
  merged["behavior"] = "MergedWithPrevious";
  Json inverted = split("a");
  inverted["invert"] = true;
  Json literal = split("a");
  literal["pattern"] = {{"String", " "}};
  const std::tuple<const char*, Json, const char*> changes[] = {
      {"/model/type", "Unigram", "Unigram"},
      {"/model/type", "WordPiece", "WordPiece"},
      {"/model/byte_fallback", true, "byte_fallback"},
      {"/model/dropout", 0.1, "dropout 0.1"},
      {"/model/continuing_subword_prefix", "##", "continuing_subword_prefix \"##\""},
      {"/model/end_of_word_suffix", "</w>", "end_of_word_suffix \"</w>\""},
      {"/normalizer", {{"type", "NFKC"}}, "NFKC"},
      {"/normalizer", {{"type", "Lowercase"}}, "Lowercase"},
      {"/normalizer",
       {{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}, {{"type", "Prepend"}}}}},
       "Prepend"},
      {"/pre_tokenizer", nullptr, "pre_tokenizer null"},
      {"/pre_tokenizer", {{"type", "Metaspace"}}, "Metaspace"},
      {"/pre_tokenizer/pretokenizers", Json::array({split("a")}), "pre_tokenizer Split"},
      {"/pre_tokenizer/pretokenizers", {{{"type", "Whitespace"}}, byte_level}, "Whitespace"},
      {"/pre_tokenizer/pretokenizers", {byte_level, byte_level}, "pre_tokenizer ByteLevel"},
      {"/pre_tokenizer/pretokenizers", {merged, byte_level}, "MergedWithPrevious"},
      {"/pre_tokenizer/pretokenizers", {inverted, byte_level}, "invert"},
      {"/pre_tokenizer/pretokenizers", {literal, byte_level}, "String"},
      {"/pre_tokenizer/pretokenizers", {split("\\w+"), byte_level}, "\\w"},
      {"/post_processor", {{"type", "RobertaProcessing"}}, "RobertaProcessing"},
      {"/post_processor", suffixed, "behind the text"},
      {"/decoder", nullptr, "decoder null"},
      {"/decoder", {{"type", "Metaspace"}}, "decoder Metaspace"},
      {"/truncation", {{"max_length", 8}}, "truncation"},
      {"/padding", {{"pad_id", 0}}, "padding"}};
  for (const auto& [pointer, value, named] : changes) {
    EXPECT_NE(refusal(pointer, value).find(named), std::string::npos)
        << pointer << " " << value.dump() << ": " << refusal(pointer, value);
  }
}

TEST_F(TokenizerRefusals, WrongFilesAreNamed) {
  const Json added{{"id", 5000}, {"content", "<new>"}};
  Json conflicting = added;
  conflicting["id"] = 7;
  Json moved{{"id", 5000}, {"content", "a"}};
  const std::tuple<const char*, Json, const char*> changes[] = {
      {"/model/vocab/!", 5, "id 5 belongs to both"},
      {"/model/vocab/!", -1, "id -1"},
      {"/model/vocab/!", 1 << 30, "id 1073741824"},
      {"/model/vocab/!", "x", "id \"x\""},
      {"/model/vocab", Json::object(), "model.vocab"},
      {"/model/merges", nullptr, "model.merges"},
      {"/model/merges/0", "a b c", "no pair of tokens"},
      {"/model/merges/0", {"a"}, "no pair of tokens"},
      {"/model/merges/0", {"a", "\u0120unreachable"}, "a\u0120unreachable"},
      {"/added_tokens", {added, added}, "two ids or entries"},
      {"/added_tokens", Json::array({conflicting}), "id 7 belongs to both"},
      {"/added_tokens", Json::array({moved}), "two ids or entries"},
      {"/added_tokens/0/content", "", "0 bytes"},
      {"/added_tokens/0/content", std::string(2000, 'x'), "2000 bytes"},
      {"/model/ignore_merges", "yes", "no tokenizer.json"},
      {"/model", nullptr, "has no model"}};
  for (const auto& [pointer, value, named] : changes) {
    EXPECT_NE(refusal(pointer, value).find(named), std::string::npos)
        << pointer << " " << value.dump() << ": " << refusal(pointer, value);
  }
  EXPECT_NE(refusal_of("{").find("not JSON"), std::string::npos);
  EXPECT_NE(refusal_of("[]").find("has no model"), std::string::npos);
  EXPECT_NE(refusal_of(std::string(1 << 20, '[')).find("nested"), std::string::npos);
  EXPECT_NE(refusal_of(std::string((64 << 20) + 1, ' ')).find("67108865 bytes"), std::string::npos);
  EXPECT_THROW(read_tokenizer(directory_.path("absent.json")), Error);
}

TEST_F(TokenizerRefusals, UnknownTokensAreNotFused) {
  std::ifstream file(BIFOCAL_SOURCE_DIR "/tests/data/tokenizers/unknown/tokenizer.json");
  json_ = Json::parse(file);
  EXPECT_EQ(refusal("/model/fuse_unk", false), "");
  EXPECT_NE(refusal("/model/fuse_unk", true).find("fuse_unk"), std::string::npos);
  EXPECT_NE(refusal("/model/unk_token", "<other>").find("<other>"), std::string::npos);
}

TEST_F(TokenizerRefusals, WordLevelIsReadByTheSameFunction) {
  const Json words{{"pre_tokenizer", {{"type", "WhitespaceSplit"}}},
                   {"model", {{"type", "WordLevel"}, {"vocab", {{"a", 0}, {"b", 1}}}}}};
  ASSERT_EQ(refusal_of(words.dump()), "");
  const std::unique_ptr<Tokenizer> tokenizer = read_tokenizer(directory_.path());
  const Encoding encoding = tokenizer->encode_with_ends(" b\u3000a ");
  EXPECT_EQ(encoding.ids, (std::vector<std::int32_t>{1, 0}));
  EXPECT_EQ(encoding.ends, (std::vector<std::int64_t>{2, 6}));
  EXPECT_EQ(tokenizer->decode(encoding.ids, true), "b a");
  EXPECT_EQ(tokenizer->normalize(" b"), " b");
  EXPECT_EQ(tokenizer->hash(), WordLevelTokenizer::read(directory_.path()).hash());
  EXPECT_FALSE(tokenizer->is_special(1));
  EXPECT_EQ(tokenizer->prefix(), std::vector<std::int32_t>{});
  EXPECT_THROW(tokenizer->encode("a\xFF"), Error);
  TextStream stream(*tokenizer, true);
  EXPECT_EQ(stream.append(1), "b");
  EXPECT_EQ(stream.append(0), " a");
  EXPECT_EQ(stream.finish(), "");
}

}  // namespace
}  // namespace bifocal
