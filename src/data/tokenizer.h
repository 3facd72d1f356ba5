// Text made into token ids and back, as a Hugging Face tokenizer.json says.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bifocal {

struct Encoding {
  std::vector<std::int32_t> ids;
  std::vector<std::int64_t> ends;  // [i]: the byte of normalize(text) where token i ends
};

// Const members may be called from several threads at once.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // Ids are below it. Added tokens count; ids in between that mean nothing may exist.
  virtual std::int64_t vocabulary() const = 0;

  // SHA-256 (hexadecimal) over all tokens in the order of their ids: equal hashes, equal meaning.
  virtual std::string hash() const = 0;

  // The id of a whole token as its file writes it, such as "<|im_end|>".
  virtual std::optional<std::int32_t> find(std::string_view token) const = 0;

  // What the tokenizer's normaliser makes of the text (NFC, or nothing). Idempotent.
  virtual std::string normalize(std::string_view text) const = 0;

  // Tokens of the text. Added tokens written in it are recognised; what the post-processor would
  // add (prefix()) is not added, as with add_special_tokens = False. Throws Error for text that is
  // not UTF-8, with the byte.
  virtual Encoding encode_with_ends(std::string_view text) const = 0;

  virtual std::vector<std::int32_t> encode(std::string_view text) const {
    return encode_with_ends(text).ids;
  }

  // Ids that the post-processor puts before a lone text, such as Llama 3's <|begin_of_text|>.
  virtual std::vector<std::int32_t> prefix() const { return {}; }

  // Whether decode leaves the token out where skip_special is set.
  virtual bool is_special(std::int32_t id) const = 0;

  // The text of a sequence. Bytes that are no whole UTF-8 character become U+FFFD. Throws Error
  // for an id outside the vocabulary.
  virtual std::string decode(std::span<const std::int32_t> ids, bool skip_special) const = 0;

  // What the token adds to the text that stands before it, in bytes; characters may be cut between
  // tokens. first: nothing stands before it (a WordLevel tokenizer parts words by spaces).
  virtual std::string piece(std::int32_t id, bool first) const = 0;
};

// Reads a tokenizer.json, or that of a directory: WordLevel behind WhitespaceSplit, or byte-level
// BPE. Throws Error that names whatever else the file asks for, since ids would differ.
std::unique_ptr<Tokenizer> read_tokenizer(const std::filesystem::path& path);

// The text of tokens that arrive one by one: whole characters only, the rest when they are whole.
class TextStream {
 public:
  TextStream(const Tokenizer& tokenizer, bool skip_special);

  // What can be shown now.
  std::string append(std::int32_t id);

  // What is left, with U+FFFD for a character that never became whole.
  std::string finish();

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  bool first_ = true;
  std::string held_;
};

}  // namespace bifocal
