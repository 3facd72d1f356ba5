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

namespace bifocal {

// Ids 0 to vocabulary() - 1, one word each.
class WordLevelTokenizer {
 public:
  // A tokenizer.json, or a directory that holds one: model WordLevel behind the pre-tokenizer
  // WhitespaceSplit. Throws Error naming whatever else the file asks for (normalizer, added tokens,
  // another model), since ids would differ, and for ids that are not 0 to n - 1.
  static WordLevelTokenizer read(const std::filesystem::path& path);

  std::int64_t vocabulary() const { return static_cast<std::int64_t>(words_.size()); }

  const std::vector<std::string>& words() const { return words_; }  // by id

  // Nothing for a word outside the vocabulary.
  std::optional<std::int32_t> find(std::string_view word) const;

  // Ids of the words that white space (as Unicode has it) parts. An unknown word becomes the
  // tokenizer's unknown token; Error naming the word where there is none.
  std::vector<std::int32_t> encode(std::string_view text) const;

  // Words joined by single spaces. Throws Error for an id outside the vocabulary.
  std::string decode(std::span<const std::int32_t> ids) const;

 private:
  WordLevelTokenizer(std::vector<std::string> words, const std::string& unknown);

  std::vector<std::string> words_;
  std::unordered_map<std::string, std::int32_t> ids_;
  std::optional<std::int32_t> unknown_;
};

}  // namespace bifocal
