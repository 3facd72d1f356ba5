// Tokenizers whose words are parted by white space: a WordLevel tokenizer.json.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "data/tokenizer.h"

namespace bifocal {

// Ids 0 to vocabulary() - 1, one word each. No token is special.
class WordLevelTokenizer final : public Tokenizer {
 public:
  // A tokenizer.json, or a directory that holds one: model WordLevel behind the pre-tokenizer
  // WhitespaceSplit. Throws Error naming whatever else the file asks for (normalizer, added tokens,
  // another model), since ids would differ, and for ids that are not 0 to n - 1.
  static WordLevelTokenizer read(const std::filesystem::path& path);

  // The same of what such a file holds; `file` names it in errors.
  static WordLevelTokenizer parse(const nlohmann::json& document, const std::string& file);

  std::int64_t vocabulary() const override { return static_cast<std::int64_t>(words_.size()); }

  const std::vector<std::string>& words() const { return words_; }  // by id

  std::string hash() const override;

  // Nothing for a word outside the vocabulary.
  std::optional<std::int32_t> find(std::string_view word) const override;

  // The text itself.
  std::string normalize(std::string_view text) const override;

  // Ids of the words that white space (as Unicode has it) parts. An unknown word becomes the
  // tokenizer's unknown token; Error naming the word where there is none.
  Encoding encode_with_ends(std::string_view text) const override;

  bool is_special(std::int32_t id) const override;

  // Words joined by single spaces. Throws Error for an id outside the vocabulary.
  std::string decode(std::span<const std::int32_t> ids, bool skip_special) const override;

  std::string decode(std::span<const std::int32_t> ids) const { return decode(ids, false); }

  std::string piece(std::int32_t id, bool first) const override;

 private:
  const std::string& word(std::int32_t id) const;

  WordLevelTokenizer(std::vector<std::string> words, const std::string& unknown);

  std::vector<std::string> words_;
  std::unordered_map<std::string, std::int32_t> ids_;
  std::optional<std::int32_t> unknown_;
};

}  // namespace bifocal
