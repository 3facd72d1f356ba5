// Reading, writing and applying WordLevel tokenizers.
#include "data/word_level_tokenizer.h"

#include <algorithm>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/file.h"
#include "data/token_file.h"
#include "data/utf8.h"

namespace bifocal {

namespace {

using Json = nlohmann::json;

std::vector<std::string_view> split_words(std::string_view text) {
  std::vector<std::string_view> words;
  std::size_t begin = 0;
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Part part = utf8_part(text, at);
    if (is_white_space(part.code)) {
      if (at > begin) {
        words.push_back(text.substr(begin, at - begin));
      }
      begin = at + part.bytes;
    }
    at += part.bytes;
  }
  if (begin < text.size()) {
    words.push_back(text.substr(begin));
  }
  return words;
}

std::string type_of(const Json& part) {
  return part.is_object() && part.contains("type") && part["type"].is_string()
             ? part["type"].get<std::string>()
             : part.dump();
}

// What is left out or null changes no ids.
void require_absent(const Json& json, const char* key, const std::string& file) {
  const auto found = json.find(key);
  BIFOCAL_REQUIRE(
      found == json.end() || found->is_null() || (found->is_array() && found->empty()),
      "[tokenizer] {}: {} {} is not supported: only plain WordLevel tokenizers are read",
      file,
      key,
      found->is_array() ? "that are not empty" : type_of(*found));
}

std::vector<std::string> parse_vocabulary(const Json& model, const std::string& file) {
  BIFOCAL_REQUIRE(model.contains("vocab") && model["vocab"].is_object(),
                  "[tokenizer] {}: wanted model.vocab, a table of words and ids",
                  file);
  const Json& table = model["vocab"];
  std::vector<std::string> words(table.size());
  std::vector<bool> is_taken(table.size(), false);
  for (const auto& [word, value] : table.items()) {
    const bool fits = value.is_number_unsigned() && value.get<std::uint64_t>() < words.size();
    BIFOCAL_REQUIRE(fits && !is_taken[value.get<std::size_t>()],
                    "[tokenizer] {}: word \"{}\" has id {}: {} words need the ids 0 to {}, each "
                    "once",
                    file,
                    word,
                    value.dump(),
                    words.size(),
                    words.size() - 1);
    const auto id = value.get<std::size_t>();
    words[id] = word;
    is_taken[id] = true;
  }
  BIFOCAL_REQUIRE(!words.empty(), "[tokenizer] {}: the vocabulary is empty", file);
  return words;
}

}  // namespace

WordLevelTokenizer::WordLevelTokenizer(std::vector<std::string> words, const std::string& unknown)
    : words_(std::move(words)) {
  for (std::size_t id = 0; id < words_.size(); ++id) {
    ids_.emplace(words_[id], static_cast<std::int32_t>(id));
  }
  unknown_ = find(unknown);
}

WordLevelTokenizer WordLevelTokenizer::read(const std::filesystem::path& path) {
  const std::filesystem::path file =
      std::filesystem::is_directory(path) ? path / "tokenizer.json" : path;
  const std::string name = file.string();
  Json json;
  try {
    json = Json::parse(read_file(file));
  } catch (const Json::exception& error) {
    fail("[tokenizer] {} is not JSON: {}", name, error.what());
  }
  return parse(json, name);
}

WordLevelTokenizer WordLevelTokenizer::parse(const Json& json, const std::string& name) {
  BIFOCAL_REQUIRE(json.is_object() && json.contains("model") && json["model"].is_object(),
                  "[tokenizer] {} is no tokenizer.json: it has no model",
                  name);
  const Json& model = json["model"];
  BIFOCAL_REQUIRE(type_of(model) == "WordLevel",
                  "[tokenizer] {}: model {} is not supported: wanted WordLevel",
                  name,
                  model.contains("type") ? type_of(model) : "without a type");
  const std::string splitter =
      json.contains("pre_tokenizer") ? type_of(json["pre_tokenizer"]) : "null";
  BIFOCAL_REQUIRE(splitter == "WhitespaceSplit",
                  "[tokenizer] {}: pre_tokenizer {} is not supported: wanted WhitespaceSplit",
                  name,
                  splitter);
  for (const char* key :
       {"normalizer", "post_processor", "decoder", "added_tokens", "truncation", "padding"}) {
    require_absent(json, key, name);
  }
  const bool has_unknown = model.contains("unk_token") && model["unk_token"].is_string();
  return {parse_vocabulary(model, name),
          has_unknown ? model["unk_token"].get<std::string>() : std::string()};
}

std::optional<std::int32_t> WordLevelTokenizer::find(std::string_view word) const {
  const auto found = ids_.find(std::string(word));
  return found == ids_.end() ? std::nullopt : std::optional(found->second);
}

std::string WordLevelTokenizer::hash() const {
  return vocabulary_hash(words_);
}

std::string WordLevelTokenizer::normalize(std::string_view text) const {
  require_utf8(text, "tokenizer");
  return std::string(text);
}

Encoding WordLevelTokenizer::encode_with_ends(std::string_view text) const {
  require_utf8(text, "tokenizer");
  Encoding encoding;
  for (const std::string_view word : split_words(text)) {
    const std::int32_t id = find(word).value_or(unknown_.value_or(-1));
    BIFOCAL_REQUIRE(
        id >= 0,
        "[tokenizer] \"{}\" is no word of the vocabulary, and there is no unknown token",
        word);
    encoding.ids.push_back(id);
    encoding.ends.push_back(word.data() + word.size() - text.data());
  }
  return encoding;
}

const std::string& WordLevelTokenizer::word(std::int32_t id) const {
  BIFOCAL_REQUIRE(0 <= id && id < vocabulary(),
                  "[tokenizer] id {} is outside the vocabulary of {}",
                  id,
                  vocabulary());
  return words_[static_cast<std::size_t>(id)];
}

bool WordLevelTokenizer::is_special(std::int32_t id) const {
  word(id);
  return false;
}

std::string WordLevelTokenizer::decode(std::span<const std::int32_t> ids,
                                       bool /*skip_special*/) const {
  std::string text;
  for (const std::int32_t id : ids) {
    text += piece(id, text.empty());
  }
  return text;
}

std::string WordLevelTokenizer::piece(std::int32_t id, bool first) const {
  std::string text(first ? "" : " ");
  text += word(id);
  return text;
}

}  // namespace bifocal
