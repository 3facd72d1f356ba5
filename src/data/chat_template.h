// Conversations written as the text that a chat model was trained on.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "data/tokenizer.h"

namespace bifocal {

struct Message {
  std::string role;  // system, user or assistant
  std::string content;
};

// The array of {"role", "content"} objects that chat data uses. Throws Error for anything else:
// unknown roles, contents that are not text, tool calls, an empty array.
std::vector<Message> messages_of(const nlohmann::json& array);

struct ChatText {
  std::string text;
  // Byte ranges [begin, end) of text: an assistant's content with the end-of-turn token that closes
  // it.
  std::vector<std::pair<std::int64_t, std::int64_t>> assistant;
};

class ChatTemplate {
 public:
  // chatml (Qwen3-4B-Instruct-2507: no default system prompt), smollm2 (puts its own system prompt
  // where none is given) or llama3. Throws Error naming the known ones.
  static ChatTemplate named(std::string_view name);

  // The known template whose text a tokenizer_config.json (or chat_template.jinja) in the
  // directory holds, found by its SHA-256; Error where it holds another one, or none.
  static ChatTemplate of_directory(const std::filesystem::path& directory);

  static std::vector<std::string> names();

  const std::string& name() const { return name_; }

  // As transformers' apply_chat_template(tokenize=False, add_generation_prompt=...). Throws Error
  // for no messages and for unknown roles.
  ChatText render(std::span<const Message> messages, bool add_generation_prompt) const;

  // The token that closes a turn, such as "<|im_end|>".
  std::string end_of_turn() const;

 private:
  explicit ChatTemplate(std::string name) : name_(std::move(name)) {}

  std::string name_;
};

// Token ids of a conversation and, per token, whether the prediction made there counts under
// data.keep = "assistant": the next token is assistant content or the end of its turn.
struct ChatIds {
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> keep;
};

// The whole text is encoded at once: ids equal those of apply_chat_template(tokenize=True). Special
// tokens written in a content count as such, as they do there. Assistant turns before the
// first_counted-th do not count.
ChatIds encode_chat(const ChatTemplate& chat,
                    const Tokenizer& tokenizer,
                    std::span<const Message> messages,
                    bool add_generation_prompt,
                    std::size_t first_counted = 0);

}  // namespace bifocal
