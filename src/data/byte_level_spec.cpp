// Reading of a byte-level tokenizer.json; what would change ids and is not known is refused.
#include "data/byte_level_spec.h"

#include <algorithm>
#include <array>
#include <unordered_set>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "data/utf8.h"

namespace bifocal {

namespace {

using Json = nlohmann::json;

constexpr std::int64_t kMaxIds = std::int64_t{1} << 22;
constexpr std::size_t kMaxAddedToken = 1024;  // bytes; bounds the time of their search

// GPT-2's, which ByteLevel has built in.
constexpr const char* kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

const Json kNull;

// A member that may be left out.
const Json& member(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() ? kNull : *found;
}

bool flag(const Json& object, const char* key, bool otherwise) {
  const Json& value = member(object, key);
  return value.is_null() ? otherwise : value.get<bool>();
}

std::string type_of(const Json& part) {
  return part.is_object() && part.contains("type") && part["type"].is_string()
             ? part["type"].get<std::string>()
             : part.dump();
}

// The parts of a Sequence, or the part itself; nothing for null.
std::vector<Json> sequence_of(const Json& part, const char* key) {
  if (part.is_null()) {
    return {};
  }
  if (type_of(part) != "Sequence") {
    return {part};
  }
  return part.at(key).get<std::vector<Json>>();
}

// The characters that stand for bytes, by byte.
const std::vector<char32_t>& byte_alphabet() {
  static const std::vector<char32_t> alphabet = [] {
    std::vector<char32_t> characters(256);
    char32_t next = 256;
    for (unsigned byte = 0; byte < 256; ++byte) {
      const bool is_printed = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
      characters[byte] = is_printed ? byte : next++;
    }
    return characters;
  }();
  return alphabet;
}

class Reader {
 public:
  Reader(const Json& document, const std::string& file)
      : document_(document), model_(document.at("model")), file_(file) {}

  ByteLevelSpec read() {
    check_model();
    read_vocabulary();
    read_added();
    read_merges();
    read_normalizer();
    read_pre_tokenizer();
    read_post_processor();
    BIFOCAL_REQUIRE(type_of(member(document_, "decoder")) == "ByteLevel",
                    "[tokenizer] {}: decoder {} is not supported: wanted ByteLevel",
                    file_,
                    type_of(member(document_, "decoder")));
    for (const char* key : {"truncation", "padding"}) {
      require_null(document_, key);
    }
    return std::move(spec_);
  }

 private:
  void require_null(const Json& object, const char* key) const {
    BIFOCAL_REQUIRE(member(object, key).is_null(),
                    "[tokenizer] {}: {} {} is not supported: wanted null",
                    file_,
                    key,
                    type_of(member(object, key)));
  }

  void check_model() const {
    const Json& dropout = member(model_, "dropout");
    BIFOCAL_REQUIRE(dropout.is_null() || dropout.get<double>() == 0.0,
                    "[tokenizer] {}: dropout {} is not supported: ids would be random",
                    file_,
                    dropout.dump());
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      const Json& affix = member(model_, key);
      BIFOCAL_REQUIRE(affix.is_null() || affix == Json(""),
                      "[tokenizer] {}: {} {} is not supported: wanted null",
                      file_,
                      key,
                      affix.dump());
    }
    BIFOCAL_REQUIRE(!flag(model_, "byte_fallback", false),
                    "[tokenizer] {}: byte_fallback is not supported: wanted byte-level BPE",
                    file_);
  }

  // Gives an id its token.
  void name(std::int32_t id, const std::string& token) {
    const auto index = static_cast<std::size_t>(id);
    if (index >= spec_.tokens.size()) {
      spec_.tokens.resize(index + 1);
      is_named_.resize(index + 1, false);
    }
    BIFOCAL_REQUIRE(!is_named_[index] || spec_.tokens[index] == token,
                    "[tokenizer] {}: id {} belongs to both \"{}\" and \"{}\"",
                    file_,
                    id,
                    spec_.tokens[index],
                    token);
    spec_.tokens[index] = token;
    is_named_[index] = true;
  }

  std::int32_t id_of(const Json& value, const std::string& token) const {
    const bool fits =
        value.is_number_unsigned() && std::cmp_less(value.get<std::uint64_t>(), kMaxIds);
    BIFOCAL_REQUIRE(fits,
                    "[tokenizer] {}: token \"{}\" has id {}: wanted 0 to {}",
                    file_,
                    token,
                    value.dump(),
                    kMaxIds - 1);
    return value.get<std::int32_t>();
  }

  void read_vocabulary() {
    const Json& table = member(model_, "vocab");
    BIFOCAL_REQUIRE(table.is_object() && !table.empty(),
                    "[tokenizer] {}: wanted model.vocab, a table of tokens and ids",
                    file_);
    for (const auto& [token, value] : table.items()) {
      const std::int32_t id = id_of(value, token);
      name(id, token);
      spec_.vocabulary.emplace(token, id);
    }
    spec_.whole_pieces_first = flag(model_, "ignore_merges", false);
    const Json& unknown = member(model_, "unk_token");
    if (!unknown.is_null()) {
      read_unknown(unknown.get<std::string>());
    }
  }

  // Matters only where bytes have no token.
  void read_unknown(const std::string& token) {
    bool lacks_bytes = false;
    for (unsigned byte = 0; byte < 256; ++byte) {
      lacks_bytes |= !spec_.vocabulary.contains(token_of_byte(static_cast<std::uint8_t>(byte)));
    }
    if (lacks_bytes) {
      BIFOCAL_REQUIRE(!flag(model_, "fuse_unk", false),
                      "[tokenizer] {}: fuse_unk is not supported where bytes have no token",
                      file_);
      spec_.unknown = vocabulary_id(token, "unk_token");
    }
  }

  std::int32_t vocabulary_id(const std::string& token, const char* user) const {
    const auto found = spec_.vocabulary.find(token);
    BIFOCAL_REQUIRE(found != spec_.vocabulary.end(),
                    "[tokenizer] {}: {} names \"{}\", which is not in model.vocab",
                    file_,
                    user,
                    token);
    return found->second;
  }

  void read_added() {
    const Json& list = member(document_, "added_tokens");
    std::unordered_set<std::string> contents;
    for (const Json& item : list.is_null() ? Json::array() : list) {
      AddedToken token{.content = item.at("content").get<std::string>(),
                       .is_special = flag(item, "special", false),
                       .is_normalized = flag(item, "normalized", true),
                       .takes_left = flag(item, "lstrip", false),
                       .takes_right = flag(item, "rstrip", false),
                       .is_word = flag(item, "single_word", false)};
      token.id = id_of(item.at("id"), token.content);
      BIFOCAL_REQUIRE(!token.content.empty() && token.content.size() <= kMaxAddedToken,
                      "[tokenizer] {}: added token {} has {} bytes: wanted 1 to {}",
                      file_,
                      token.id,
                      token.content.size(),
                      kMaxAddedToken);
      const bool is_new = contents.insert(token.content).second;
      const auto in_model = spec_.vocabulary.find(token.content);
      BIFOCAL_REQUIRE(
          is_new && (in_model == spec_.vocabulary.end() || in_model->second == token.id),
          "[tokenizer] {}: added token \"{}\" has two ids or entries",
          file_,
          token.content);
      name(token.id, token.content);
      spec_.added.push_back(std::move(token));
    }
  }

  void read_merges() {
    const Json& list = member(model_, "merges");
    BIFOCAL_REQUIRE(list.is_array(), "[tokenizer] {}: wanted model.merges, an array", file_);
    spec_.merges = MergeTable(list.size());
    std::int32_t rank = 0;
    for (const Json& item : list) {
      if (item.is_string() && item.get_ref<const std::string&>().starts_with("#version")) {
        continue;
      }
      const auto [left, right] = pair_of(item);
      spec_.merges.insert(vocabulary_id(left, "a merge"),
                          vocabulary_id(right, "a merge"),
                          {rank++, vocabulary_id(left + right, "a merge")});
    }
  }

  // "a b" or ["a", "b"].
  std::pair<std::string, std::string> pair_of(const Json& item) const {
    if (item.is_array() && item.size() == 2) {
      return {item[0].get<std::string>(), item[1].get<std::string>()};
    }
    const std::string text = item.is_string() ? item.get<std::string>() : std::string();
    const std::size_t space = text.find(' ');
    BIFOCAL_REQUIRE(space != std::string::npos && text.find(' ', space + 1) == std::string::npos,
                    "[tokenizer] {}: merge {} is no pair of tokens",
                    file_,
                    item.dump());
    return {text.substr(0, space), text.substr(space + 1)};
  }

  void read_normalizer() {
    for (const Json& part : sequence_of(member(document_, "normalizer"), "normalizers")) {
      BIFOCAL_REQUIRE(type_of(part) == "NFC",
                      "[tokenizer] {}: normalizer {} is not supported: wanted NFC or null",
                      file_,
                      type_of(part));
      spec_.is_nfc = true;
    }
  }

  void read_pre_tokenizer() {
    const std::vector<Json> parts =
        sequence_of(member(document_, "pre_tokenizer"), "pretokenizers");
    BIFOCAL_REQUIRE(
        !parts.empty() && type_of(parts.back()) == "ByteLevel",
        "[tokenizer] {}: pre_tokenizer {} is not supported: wanted ByteLevel at its end",
        file_,
        parts.empty() ? "null" : type_of(parts.back()));
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      const std::string type = type_of(parts[i]);
      if (type == "Digits") {
        const bool is_single = flag(parts[i], "individual_digits", false);
        spec_.steps.push_back({.pattern = is_single ? "\\p{N}" : "\\p{N}+"});
      } else {
        BIFOCAL_REQUIRE(type == "Split",
                        "[tokenizer] {}: pre_tokenizer {} is not supported: wanted Split or Digits "
                        "before ByteLevel",
                        file_,
                        type);
        spec_.steps.push_back({.pattern = pattern_of(parts[i])});
      }
    }
    if (flag(parts.back(), "add_prefix_space", true)) {
      spec_.steps.push_back({.puts_space = true});
    }
    if (flag(parts.back(), "use_regex", true)) {
      spec_.steps.push_back({.pattern = kByteLevelPattern});
    }
  }

  std::string pattern_of(const Json& split) const {
    const Json& pattern = split.at("pattern");
    BIFOCAL_REQUIRE(pattern.is_object() && pattern.contains("Regex"),
                    "[tokenizer] {}: Split by {} is not supported: wanted a Regex",
                    file_,
                    pattern.dump());
    const Json& behavior = member(split, "behavior");
    BIFOCAL_REQUIRE(behavior == "Isolated",
                    "[tokenizer] {}: Split with behavior {} is not supported: wanted Isolated",
                    file_,
                    behavior.dump());
    BIFOCAL_REQUIRE(
        !flag(split, "invert", false), "[tokenizer] {}: Split with invert is not supported", file_);
    return pattern["Regex"].get<std::string>();
  }

  void read_post_processor() {
    for (const Json& part : sequence_of(member(document_, "post_processor"), "processors")) {
      const std::string type = type_of(part);
      if (type == "ByteLevel") {  // moves offsets only
        continue;
      }
      BIFOCAL_REQUIRE(type == "TemplateProcessing",
                      "[tokenizer] {}: post_processor {} is not supported: wanted ByteLevel or "
                      "TemplateProcessing",
                      file_,
                      type);
      BIFOCAL_REQUIRE(
          spec_.prefix.empty(), "[tokenizer] {}: two TemplateProcessing are not supported", file_);
      read_template(part);
    }
  }

  void read_template(const Json& part) {
    int texts = 0;
    for (const Json& item : part.at("single")) {
      if (item.contains("Sequence")) {
        ++texts;
        continue;
      }
      const auto token = item.at("SpecialToken").at("id").get<std::string>();
      BIFOCAL_REQUIRE(texts == 0,
                      "[tokenizer] {}: TemplateProcessing that puts \"{}\" behind the text is not "
                      "supported",
                      file_,
                      token);
      for (const Json& id : part.at("special_tokens").at(token).at("ids")) {
        const std::int32_t value = id_of(id, token);
        BIFOCAL_REQUIRE(std::cmp_less(value, spec_.tokens.size()),
                        "[tokenizer] {}: TemplateProcessing names id {}, which has no token",
                        file_,
                        value);
        spec_.prefix.push_back(value);
      }
    }
    BIFOCAL_REQUIRE(texts == 1,
                    "[tokenizer] {}: TemplateProcessing with {} texts is not supported: wanted one",
                    file_,
                    texts);
  }

  const Json& document_;
  const Json& model_;
  const std::string& file_;
  ByteLevelSpec spec_;
  std::vector<bool> is_named_;
};

}  // namespace

std::string token_of_byte(std::uint8_t byte) {
  const char32_t code = byte_alphabet()[byte];
  if (code < 0x80) {
    return {static_cast<char>(code)};
  }
  return {static_cast<char>(0xC0U | (code >> 6U)), static_cast<char>(0x80U | (code & 0x3FU))};
}

std::optional<std::string> bytes_of_token(std::string_view token) {
  static const auto bytes = [] {
    std::array<int, 0x144> table{};
    table.fill(-1);
    for (std::size_t byte = 0; byte < 256; ++byte) {
      table.at(byte_alphabet()[byte]) = static_cast<int>(byte);
    }
    return table;
  }();
  std::string result;
  for (std::size_t at = 0; at < token.size();) {
    const Utf8Part part = utf8_part(token, at);
    if (!part.is_whole || part.code >= bytes.size() || bytes[part.code] < 0) {
      return std::nullopt;
    }
    result += static_cast<char>(bytes[part.code]);
    at += part.bytes;
  }
  return result;
}

ByteLevelSpec read_byte_level_spec(const nlohmann::json& document, const std::string& file) {
  return Reader(document, file).read();
}

}  // namespace bifocal
