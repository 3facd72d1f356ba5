// Tokens that are found in a text before anything else is done with it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bifocal {

struct AddedToken {
  std::int32_t id = 0;
  std::string content;
  bool is_special = false;     // decode can leave it out
  bool is_normalized = false;  // searched in the normalised text, otherwise in the text as it came
  bool takes_left = false;     // lstrip: with the white space before it
  bool takes_right = false;    // rstrip: with the white space behind it
  bool is_word = false;        // single_word: only where no letters or digits adjoin
};

// A part of a text: an added token, or what stands between.
struct TextPart {
  std::string_view text;
  std::int32_t id;  // -1: no added token
};

// Finds tokens from left to right, of those that begin at one place the longest.
class AddedTokenFinder {
 public:
  // Of tokens with equal contents the first counts.
  explicit AddedTokenFinder(std::span<const AddedToken> tokens);

  // The parts in order; together they are the text (which is UTF-8). An empty text has none.
  std::vector<TextPart> split(std::string_view text) const;

 private:
  using Edge = std::pair<std::uint8_t, std::int32_t>;  // byte, node

  struct Node {
    std::vector<Edge> next;   // sorted by byte
    std::int32_t token = -1;  // index of the token that ends here
  };

  // Index of the longest token at a place; -1 for none.
  std::int32_t longest_at(std::string_view text, std::size_t at) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_;                // [0]: the root
  std::array<std::int32_t, 256> first_{};  // nodes behind the root, by byte; 0: none
};

}  // namespace bifocal
