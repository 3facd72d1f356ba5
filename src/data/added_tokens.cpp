// A tree of the tokens' bytes, walked from each place of the text.
#include "data/added_tokens.h"

#include <algorithm>
#include <utf8proc.h>

#include "data/utf8.h"

namespace bifocal {

namespace {

// What \w means to the library: Alphabetic, marks, decimal digits, connectors and joiners.
bool is_word_character(char32_t code) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(code))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:  // joiners, and letters in circles and squares
      return code == 0x200C || code == 0x200D || (code >= 0x24B6 && code <= 0x24E9) ||
             (code >= 0x1F130 && code <= 0x1F149) || (code >= 0x1F150 && code <= 0x1F169) ||
             (code >= 0x1F170 && code <= 0x1F189);
  }
}

// The character that ends at a place; 0 < end.
Utf8Part part_before(std::string_view text, std::size_t end) {
  std::size_t begin = end - 1;
  while (begin > 0 && (static_cast<std::uint8_t>(text[begin]) & 0xC0U) == 0x80) {
    --begin;
  }
  return utf8_part(text, begin);
}

bool adjoins_word(std::string_view text, std::size_t begin, std::size_t end) {
  return (begin > 0 && is_word_character(part_before(text, begin).code)) ||
         (end < text.size() && is_word_character(utf8_part(text, end).code));
}

// Where the white space that ends at a place begins.
std::size_t space_before(std::string_view text, std::size_t end) {
  while (end > 0) {
    const Utf8Part part = part_before(text, end);
    if (!is_white_space(part.code)) {
      break;
    }
    end -= part.bytes;
  }
  return end;
}

std::size_t space_behind(std::string_view text, std::size_t begin) {
  while (begin < text.size()) {
    const Utf8Part part = utf8_part(text, begin);
    if (!is_white_space(part.code)) {
      break;
    }
    begin += part.bytes;
  }
  return begin;
}

}  // namespace

AddedTokenFinder::AddedTokenFinder(std::span<const AddedToken> tokens)
    : tokens_(tokens.begin(), tokens.end()), nodes_(1) {
  for (std::size_t index = 0; index < tokens_.size(); ++index) {
    std::int32_t node = 0;
    for (const char c : tokens_[index].content) {
      const Edge edge{static_cast<std::uint8_t>(c), static_cast<std::int32_t>(nodes_.size())};
      auto& next = nodes_[static_cast<std::size_t>(node)].next;
      const auto place = std::ranges::lower_bound(next, edge.first, {}, &Edge::first);
      if (place != next.end() && place->first == edge.first) {
        node = place->second;
        continue;
      }
      next.insert(place, edge);
      node = edge.second;
      nodes_.emplace_back();
    }
    auto& token = nodes_[static_cast<std::size_t>(node)].token;
    token = token < 0 ? static_cast<std::int32_t>(index) : token;
  }
  for (const auto& [byte, node] : nodes_[0].next) {
    first_[byte] = node;
  }
}

std::int32_t AddedTokenFinder::longest_at(std::string_view text, std::size_t at) const {
  std::int32_t node = first_[static_cast<std::uint8_t>(text[at])];
  std::int32_t token = -1;
  while (node > 0) {
    const Node& here = nodes_[static_cast<std::size_t>(node)];
    token = here.token >= 0 ? here.token : token;
    if (++at == text.size()) {
      break;
    }
    const auto byte = static_cast<std::uint8_t>(text[at]);
    const auto place = std::ranges::lower_bound(here.next, byte, {}, &Edge::first);
    node = place != here.next.end() && place->first == byte ? place->second : 0;
  }
  return token;
}

std::vector<TextPart> AddedTokenFinder::split(std::string_view text) const {
  std::vector<TextPart> parts;
  std::size_t done = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::int32_t index = longest_at(text, at);
    if (index < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<std::size_t>(index)];
    std::size_t begin = at;
    std::size_t end = at + token.content.size();
    at = end;
    if (token.is_word && adjoins_word(text, begin, end)) {
      continue;
    }
    if (token.takes_left) {
      begin = space_before(text, begin);
    }
    if (token.takes_right) {
      end = space_behind(text, end);
    }
    begin = std::max(begin, done);
    if (done < begin) {
      parts.push_back({text.substr(done, begin - done), -1});
    }
    // A token of white space that the token before it took is found all the same.
    end = std::max(end, begin);
    parts.push_back({text.substr(begin, end - begin), token.id});
    done = end;
  }
  if (done < text.size()) {
    parts.push_back({text.substr(done), -1});
  }
  return parts;
}

}  // namespace bifocal
