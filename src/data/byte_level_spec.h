// What a tokenizer.json of a byte-level BPE says, checked.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "data/added_tokens.h"
#include "data/bpe_merge.h"

namespace bifocal {

// One step of cutting, applied to every piece that the steps before left.
struct SplitStep {
  bool puts_space = false;  // a space before a piece that has none; otherwise:
  std::string pattern;      // cuts by a pattern
};

struct ByteLevelSpec {
  std::vector<std::string> tokens;  // by id, as the file writes them; "" for ids without a meaning
  std::unordered_map<std::string, std::int32_t> vocabulary;  // the model's tokens
  std::vector<AddedToken> added;
  MergeTable merges{0};
  std::optional<std::int32_t> unknown;  // for bytes without a token
  bool whole_pieces_first = false;      // ignore_merges
  bool is_nfc = false;
  std::vector<SplitStep> steps;
  std::vector<std::int32_t> prefix;  // ids that the post-processor puts first
};

// The bytes that a token stands for; nothing where it has characters that stand for none.
std::optional<std::string> bytes_of_token(std::string_view token);

// The character of a byte, as a token writes it.
std::string token_of_byte(std::uint8_t byte);

// `file` names the document in errors. Throws Error naming what is not supported or wrong.
ByteLevelSpec read_byte_level_spec(const nlohmann::json& document, const std::string& file);

}  // namespace bifocal
