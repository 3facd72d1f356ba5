// Documents: a line of JSON made into token ids and a mask.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/chat_template.h"
#include "data/tokenizer.h"

namespace bifocal {

// keep [ids]: 1 where the prediction made at a token, of the token after it, counts under
// data.keep = "assistant".
struct Document {
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> keep;
};

// The key that tells the form of a line. Others of its keys mean nothing, nor do keys whose value
// is null.
enum class DocumentForm : std::uint8_t {
  any,         // the one of the following that a line has
  messages,    // [{"role", "content"}, ..]; kept: what predicts assistant content and end of turn
  completion,  // with prompt; both text, or both lists of messages; kept: what predicts it
  text,        // kept: all but the last token
  ids,         // kept: as keep says, or all but the last
  answer_ids,  // with prompt_ids; kept: what predicts an answer token
};

struct DocumentOptions {
  const Tokenizer* tokenizer = nullptr;  // needed by text; must outlive the reader
  std::optional<ChatTemplate> chat;      // needed by messages
  std::string no_chat_reason;            // what to tell where there is none
  std::string end_token;                 // put after text and completions; empty: none
  std::int64_t vocabulary = 0;           // ids must be below it
  DocumentForm form = DocumentForm::any;
};

// Text and completions get the tokenizer's prefix in front. Prompt and completion are encoded one
// by one, as generation does.
class DocumentReader {
 public:
  // Throws Error where the tokenizer does not know the end token.
  explicit DocumentReader(DocumentOptions options);

  // No ids where the line's document is empty. Throws Error for a line that is no UTF-8, no JSON
  // object, has no form or several, or cannot be encoded. Safe to call from several threads.
  Document read(std::string_view line) const;

 private:
  Document read_messages(const nlohmann::json& line) const;
  Document read_completion(const nlohmann::json& line) const;
  Document read_conversation(const nlohmann::json& prompt, const nlohmann::json& completion) const;
  Document read_text(const nlohmann::json& line) const;
  std::vector<std::int32_t> encode(const nlohmann::json& text, const char* key) const;
  const ChatTemplate& chat() const;

  DocumentOptions options_;
  std::vector<std::int32_t> end_;  // the end token, or nothing
};

// "messages" and so on; "any".
std::string_view name_of(DocumentForm form);

// Throws Error that names the known ones.
DocumentForm document_form(std::string_view name);

}  // namespace bifocal
