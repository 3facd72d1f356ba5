// Byte pair encoding over bytes: the tokenizers of Qwen, Llama 3, SmolLM2 and GPT-2.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "data/added_tokens.h"
#include "data/bpe_merge.h"
#include "data/byte_level_spec.h"
#include "data/split_pattern.h"
#include "data/tokenizer.h"

namespace bifocal {

// Ids are those of the Hugging Face `tokenizers` library, with one exception: code points newer
// than the Unicode tables of PCRE2 and utf8proc (14 and 15 on Debian 12) count as unassigned. As
// there, a byte without a token becomes the unknown token or, without one, nothing.
class ByteLevelTokenizer final : public Tokenizer {
 public:
  // `file` names the document in errors. Throws Error naming what the document asks for in vain.
  ByteLevelTokenizer(const nlohmann::json& document, const std::string& file);

  std::int64_t vocabulary() const override { return static_cast<std::int64_t>(texts_.size()); }

  std::string hash() const override { return hash_; }

  std::optional<std::int32_t> find(std::string_view token) const override;

  // Added tokens that are found before normalising keep apart what stands around them.
  std::string normalize(std::string_view text) const override;

  Encoding encode_with_ends(std::string_view text) const override;

  std::vector<std::int32_t> prefix() const override { return prefix_; }

  bool is_special(std::int32_t id) const override;

  std::string decode(std::span<const std::int32_t> ids, bool skip_special) const override;

  std::string piece(std::int32_t id, bool first) const override;

 private:
  struct Writer;

  struct Step {
    std::optional<SplitPattern> pattern;  // nothing: puts a space
  };

  explicit ByteLevelTokenizer(ByteLevelSpec spec);

  void encode_text(std::string_view text, std::size_t step, Writer& writer) const;
  void encode_piece(std::string_view piece, Writer& writer) const;
  // False where a byte had no token.
  bool merge_piece(std::string_view piece, std::vector<Symbol>& symbols) const;
  std::size_t checked(std::int32_t id) const;

  std::uint32_t serial_;  // names this tokenizer in the caches of the threads
  std::string hash_;
  std::unordered_map<std::string, std::int32_t> ids_;  // all tokens, as the file writes them
  std::unordered_map<std::string, std::int32_t> whole_pieces_;  // bytes; where ignore_merges is set
  std::vector<std::string> texts_;                              // bytes by id
  std::vector<std::uint8_t> is_special_;
  std::array<std::int32_t, 256> byte_ids_{};  // -1: the byte has no token
  MergeTable merges_;
  std::optional<std::int32_t> unknown_;
  bool is_nfc_;

  std::vector<Step> steps_;
  std::vector<std::int32_t> prefix_;
  AddedTokenFinder raw_tokens_;
  AddedTokenFinder normalized_tokens_;
};

}  // namespace bifocal
