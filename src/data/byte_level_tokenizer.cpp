// Encoding and decoding: added tokens, normalisation, cutting, merging.
#include "data/byte_level_tokenizer.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "data/normalization.h"
#include "data/token_file.h"
#include "data/utf8.h"

namespace bifocal {

namespace {

// A piece and its tokens in one cache line.
struct CachedPiece {
  static constexpr std::size_t kBytes = 26;
  static constexpr std::size_t kIds = 8;

  std::uint32_t owner = 0;  // serial of the tokenizer; 0: empty
  std::uint8_t bytes = 0;
  std::uint8_t count = 0;
  std::array<char, kBytes> text{};
  std::array<std::int32_t, kIds> ids{};
};

static_assert(sizeof(CachedPiece) == 64);

constexpr unsigned kCacheBits = 15;

// What a thread keeps for encoding.
struct EncodeScratch {
  std::vector<CachedPiece> cache = std::vector<CachedPiece>(std::size_t{1} << kCacheBits);
  std::vector<Symbol> symbols;
  MergeScratch merge;
};

EncodeScratch& encode_scratch() {
  thread_local EncodeScratch scratch;
  return scratch;
}

// The place of a piece of at most CachedPiece::kBytes bytes.
std::size_t slot_of(std::string_view piece, std::uint32_t serial) {
  std::array<std::uint64_t, 4> words{};
  std::memcpy(words.data(), piece.data(), piece.size());
  std::uint64_t hash = serial + piece.size();
  for (const std::uint64_t word : words) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15U;
    hash ^= hash >> 32U;
  }
  return (hash * 0x9E3779B97F4A7C15U) >> (64U - kCacheBits);
}

std::vector<AddedToken> added_of(const ByteLevelSpec& spec, bool is_normalized) {
  std::vector<AddedToken> tokens;
  for (const bool is_special : {true, false}) {
    for (const AddedToken& token : spec.added) {
      if (token.is_normalized == is_normalized && token.is_special == is_special) {
        tokens.push_back(token);
        std::string storage;
        if (is_normalized && spec.is_nfc) {
          tokens.back().content = nfc(token.content, storage);
        }
      }
    }
  }
  return tokens;
}

std::uint32_t next_serial() {
  static std::atomic<std::uint32_t> serial{0};
  return ++serial;
}

}  // namespace

// Where the tokens of a text go.
struct ByteLevelTokenizer::Writer {
  Encoding encoding;
  std::int64_t end = 0;  // of the normalised text that has been written
  SplitBudget budget;

  void add(std::int32_t id, std::size_t bytes) {
    end += static_cast<std::int64_t>(bytes);
    encoding.ids.push_back(id);
    encoding.ends.push_back(end);
  }
};

ByteLevelTokenizer::ByteLevelTokenizer(const nlohmann::json& document, const std::string& file)
    : ByteLevelTokenizer(read_byte_level_spec(document, file)) {}

ByteLevelTokenizer::ByteLevelTokenizer(ByteLevelSpec spec)
    : serial_(next_serial()),
      hash_(vocabulary_hash(spec.tokens)),
      is_special_(spec.tokens.size(), 0),
      merges_(std::move(spec.merges)),
      unknown_(spec.unknown),
      is_nfc_(spec.is_nfc),
      prefix_(spec.prefix),
      raw_tokens_(added_of(spec, false)),
      normalized_tokens_(added_of(spec, true)) {
  for (const std::string& token : spec.tokens) {
    texts_.push_back(bytes_of_token(token).value_or(token));
  }
  for (unsigned byte = 0; byte < byte_ids_.size(); ++byte) {
    const auto found = spec.vocabulary.find(token_of_byte(static_cast<std::uint8_t>(byte)));
    byte_ids_[byte] = found == spec.vocabulary.end() ? -1 : found->second;
  }
  if (spec.whole_pieces_first) {
    for (const auto& [token, id] : spec.vocabulary) {
      if (std::optional<std::string> bytes = bytes_of_token(token)) {
        whole_pieces_.emplace(std::move(*bytes), id);
      }
    }
  }
  // The library decodes such tokens as they are searched.
  for (const AddedToken& token : added_of(spec, true)) {
    texts_[static_cast<std::size_t>(token.id)] =
        bytes_of_token(token.content).value_or(token.content);
  }
  for (const SplitStep& step : spec.steps) {
    steps_.push_back({step.puts_space ? std::nullopt : std::optional<SplitPattern>(step.pattern)});
  }
  ids_ = std::move(spec.vocabulary);
  for (const AddedToken& token : spec.added) {
    ids_.emplace(token.content, token.id);
    is_special_[static_cast<std::size_t>(token.id)] = token.is_special ? 1 : 0;
  }
}

std::optional<std::int32_t> ByteLevelTokenizer::find(std::string_view token) const {
  const auto found = ids_.find(std::string(token));
  return found == ids_.end() ? std::nullopt : std::optional(found->second);
}

std::string ByteLevelTokenizer::normalize(std::string_view text) const {
  require_utf8(text, "tokenizer");
  if (!is_nfc_) {
    return std::string(text);
  }
  std::string result;
  std::string storage;
  for (const TextPart& part : raw_tokens_.split(text)) {
    result += part.id >= 0 ? part.text : nfc(part.text, storage);
  }
  return result;
}

Encoding ByteLevelTokenizer::encode_with_ends(std::string_view text) const {
  require_utf8(text, "tokenizer");
  Writer writer{.encoding = {}, .budget = SplitBudget(time_to_split(text.size()))};
  std::string storage;
  for (const TextPart& raw : raw_tokens_.split(text)) {
    if (raw.id >= 0) {
      writer.add(raw.id, raw.text.size());
      continue;
    }
    for (const TextPart& part :
         normalized_tokens_.split(is_nfc_ ? nfc(raw.text, storage) : raw.text)) {
      if (part.id >= 0) {
        writer.add(part.id, part.text.size());
      } else {
        encode_text(part.text, 0, writer);
      }
    }
  }
  return std::move(writer.encoding);
}

void ByteLevelTokenizer::encode_text(std::string_view text,
                                     std::size_t step,
                                     Writer& writer) const {
  if (step == steps_.size()) {
    encode_piece(text, writer);
    return;
  }
  if (!steps_[step].pattern) {
    if (text.starts_with(' ')) {
      encode_text(text, step + 1, writer);
    } else {
      --writer.end;  // the space is no byte of the text
      std::string spaced(1, ' ');
      spaced += text;
      encode_text(spaced, step + 1, writer);
    }
    return;
  }
  Splitter splitter(*steps_[step].pattern, text, writer.budget);
  while (const std::optional<std::string_view> piece = splitter.next()) {
    encode_text(*piece, step + 1, writer);
  }
}

void ByteLevelTokenizer::encode_piece(std::string_view piece, Writer& writer) const {
  EncodeScratch& scratch = encode_scratch();
  CachedPiece* cached = nullptr;
  if (piece.size() <= CachedPiece::kBytes) {
    cached = &scratch.cache[slot_of(piece, serial_)];
    if (cached->owner == serial_ && cached->bytes == piece.size() &&
        std::memcmp(cached->text.data(), piece.data(), piece.size()) == 0) {
      for (std::size_t i = 0; i < cached->count; ++i) {
        const std::int32_t id = cached->ids[i];
        writer.add(id, texts_[static_cast<std::size_t>(id)].size());
      }
      return;
    }
  }
  std::vector<Symbol>& symbols = scratch.symbols;
  const bool is_plain = merge_piece(piece, symbols);
  for (std::size_t i = 0; i < symbols.size(); ++i) {
    // Bytes that have no token go to the token before them, the first ones to the first.
    const std::size_t begin = i == 0 ? 0 : symbols[i].begin;
    const std::size_t end = i + 1 < symbols.size() ? symbols[i + 1].begin : piece.size();
    writer.add(symbols[i].id, end - begin);
  }
  writer.end += symbols.empty() ? static_cast<std::int64_t>(piece.size()) : 0;
  // What is cached ends where the tokens' own bytes end.
  if (cached != nullptr && is_plain && symbols.size() <= CachedPiece::kIds) {
    cached->owner = serial_;
    cached->bytes = static_cast<std::uint8_t>(piece.size());
    cached->count = static_cast<std::uint8_t>(symbols.size());
    std::ranges::copy(piece, cached->text.begin());
    std::ranges::transform(symbols, cached->ids.begin(), &Symbol::id);
  }
}

bool ByteLevelTokenizer::merge_piece(std::string_view piece, std::vector<Symbol>& symbols) const {
  symbols.clear();
  if (!whole_pieces_.empty()) {
    if (const auto whole = whole_pieces_.find(std::string(piece)); whole != whole_pieces_.end()) {
      symbols.push_back({whole->second, 0});
      return true;
    }
  }
  BIFOCAL_REQUIRE(std::in_range<std::int32_t>(piece.size()),
                  "[tokenizer] a piece of {} bytes that the pattern does not cut is too long",
                  piece.size());
  bool is_plain = true;
  for (std::size_t at = 0; at < piece.size(); ++at) {
    const std::int32_t id = byte_ids_[static_cast<std::uint8_t>(piece[at])];
    is_plain = is_plain && id >= 0;
    if (id >= 0 || unknown_) {
      symbols.push_back({id >= 0 ? id : *unknown_, static_cast<std::uint32_t>(at)});
    }
  }
  merge_symbols(merges_, symbols, encode_scratch().merge);
  return is_plain;
}

std::size_t ByteLevelTokenizer::checked(std::int32_t id) const {
  BIFOCAL_REQUIRE(0 <= id && id < vocabulary(),
                  "[tokenizer] id {} is outside the vocabulary of {}",
                  id,
                  vocabulary());
  return static_cast<std::size_t>(id);
}

bool ByteLevelTokenizer::is_special(std::int32_t id) const {
  return is_special_[checked(id)] != 0;
}

std::string ByteLevelTokenizer::decode(std::span<const std::int32_t> ids, bool skip_special) const {
  std::string bytes;
  for (const std::int32_t id : ids) {
    const std::size_t index = checked(id);
    if (!skip_special || is_special_[index] == 0) {
      bytes += texts_[index];
    }
  }
  return replace_invalid_utf8(bytes);
}

std::string ByteLevelTokenizer::piece(std::int32_t id, bool /*first*/) const {
  return texts_[checked(id)];
}

}  // namespace bifocal
