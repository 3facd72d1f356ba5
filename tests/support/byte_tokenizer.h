// A tokenizer small enough to check by eye: a token per byte, and a few added tokens.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "data/tokenizer.h"

namespace bifocal::test {

class ByteTokenizer final : public Tokenizer {
 public:
  static constexpr std::array<std::string_view, 4> kAdded = {
      "<s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"};
  static constexpr std::int32_t kBegin = 256;
  static constexpr std::int32_t kEndOfTurn = 258;
  static constexpr std::int32_t kEndOfText = 259;

  explicit ByteTokenizer(bool has_prefix = true) : has_prefix_(has_prefix) {}

  std::int64_t vocabulary() const override { return 260; }

  std::string hash() const override { return "bytes"; }

  std::optional<std::int32_t> find(std::string_view token) const override {
    for (std::size_t i = 0; i < kAdded.size(); ++i) {
      if (token == kAdded[i]) {
        return static_cast<std::int32_t>(256 + i);
      }
    }
    return std::nullopt;
  }

  std::string normalize(std::string_view text) const override { return std::string(text); }

  Encoding encode_with_ends(std::string_view text) const override {
    Encoding encoding;
    for (std::size_t at = 0; at < text.size();) {
      std::size_t bytes = 1;
      auto id = static_cast<std::int32_t>(static_cast<unsigned char>(text[at]));
      for (std::size_t i = 0; i < kAdded.size(); ++i) {
        if (text.substr(at).starts_with(kAdded[i])) {
          id = static_cast<std::int32_t>(256 + i);
          bytes = kAdded[i].size();
        }
      }
      at += bytes;
      encoding.ids.push_back(id);
      encoding.ends.push_back(static_cast<std::int64_t>(at));
    }
    return encoding;
  }

  std::vector<std::int32_t> prefix() const override {
    return has_prefix_ ? std::vector<std::int32_t>{kBegin} : std::vector<std::int32_t>{};
  }

  bool is_special(std::int32_t id) const override { return id >= 256; }

  std::string decode(std::span<const std::int32_t> ids, bool skip_special) const override {
    std::string text;
    for (const std::int32_t id : ids) {
      text += skip_special && is_special(id) ? "" : piece(id, text.empty());
    }
    return text;
  }

  std::string piece(std::int32_t id, bool /*first*/) const override {
    BIFOCAL_REQUIRE(id >= 0 && id < 260, "[byte_tokenizer] id {} is outside of 260", id);
    return id < 256 ? std::string(1, static_cast<char>(id))
                    : std::string(kAdded[static_cast<std::size_t>(id - 256)]);
  }

 private:
  bool has_prefix_;
};

}  // namespace bifocal::test
