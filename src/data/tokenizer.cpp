// Which tokenizer a file holds, and text that comes token by token.
#include "data/tokenizer.h"

#include <algorithm>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/file.h"
#include "data/byte_level_tokenizer.h"
#include "data/utf8.h"
#include "data/word_level_tokenizer.h"

namespace bifocal {

namespace {

constexpr std::uintmax_t kMaxFile = std::uintmax_t{64} << 20;
constexpr int kMaxDepth = 64;

// How deep arrays and objects are nested. Parsing takes hundreds of bytes a level.
int depth_of(std::string_view json) {
  int depth = 0;
  int deepest = 0;
  bool in_text = false;
  for (std::size_t at = 0; at < json.size(); ++at) {
    const char c = json[at];
    if (c == '"') {
      in_text = !in_text;
    } else if (in_text) {
      at += c == '\\' ? 1 : 0;
    } else if (c == '[' || c == '{') {
      deepest = std::max(deepest, ++depth);
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return deepest;
}

std::unique_ptr<Tokenizer> tokenizer_of(const nlohmann::json& document, const std::string& file) {
  BIFOCAL_REQUIRE(
      document.is_object() && document.contains("model") && document["model"].is_object(),
      "[tokenizer] {} is no tokenizer.json: it has no model",
      file);
  const nlohmann::json& model = document["model"];
  // Old files leave the type out; then the merges tell.
  const std::string type = model.contains("type")     ? model["type"].get<std::string>()
                           : model.contains("merges") ? "BPE"
                                                      : "without a type";
  if (type == "WordLevel") {
    return std::make_unique<WordLevelTokenizer>(WordLevelTokenizer::parse(document, file));
  }
  BIFOCAL_REQUIRE(type == "BPE",
                  "[tokenizer] {}: model {} is not supported: wanted BPE or WordLevel",
                  file,
                  type);
  return std::make_unique<ByteLevelTokenizer>(document, file);
}

}  // namespace

std::unique_ptr<Tokenizer> read_tokenizer(const std::filesystem::path& path) {
  const std::filesystem::path file =
      std::filesystem::is_directory(path) ? path / "tokenizer.json" : path;
  std::error_code error;
  const std::uintmax_t bytes = std::filesystem::file_size(file, error);
  BIFOCAL_REQUIRE(error || bytes <= kMaxFile,
                  "[tokenizer] {} has {} bytes: at most {} are read",
                  file.string(),
                  bytes,
                  kMaxFile);
  const std::string text = read_file(file);
  BIFOCAL_REQUIRE(depth_of(text) <= kMaxDepth,
                  "[tokenizer] {} is no tokenizer.json: it is nested deeper than {} levels",
                  file.string(),
                  kMaxDepth);
  try {
    return tokenizer_of(nlohmann::json::parse(text), file.string());
  } catch (const nlohmann::json::parse_error& wrong) {
    fail("[tokenizer] {} is not JSON: {}", file.string(), wrong.what());
  } catch (const nlohmann::json::exception& wrong) {
    fail("[tokenizer] {} is no tokenizer.json: {}", file.string(), wrong.what());
  }
}

TextStream::TextStream(const Tokenizer& tokenizer, bool skip_special)
    : tokenizer_(&tokenizer), skip_special_(skip_special) {}

std::string TextStream::append(std::int32_t id) {
  if (skip_special_ && tokenizer_->is_special(id)) {
    return {};
  }
  held_ += tokenizer_->piece(id, first_);
  first_ = false;
  const std::size_t whole = held_.size() - cut_utf8_bytes(held_);
  std::string shown = replace_invalid_utf8(std::string_view(held_).substr(0, whole));
  held_.erase(0, whole);
  return shown;
}

std::string TextStream::finish() {
  first_ = true;
  return replace_invalid_utf8(std::exchange(held_, {}));
}

}  // namespace bifocal
