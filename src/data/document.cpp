// Reading of documents.
#include "data/document.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "data/json_lines.h"

namespace bifocal {

namespace {

using Json = nlohmann::json;

constexpr std::array kForms = {DocumentForm::messages,
                               DocumentForm::completion,
                               DocumentForm::text,
                               DocumentForm::ids,
                               DocumentForm::answer_ids};

// Keeps what predicts tokens [begin, end) of a document.
std::vector<std::uint8_t> keep_before(std::size_t begin, std::size_t end) {
  std::vector<std::uint8_t> keep(end, 0);
  for (std::size_t t = std::max<std::size_t>(begin, 1); t < end; ++t) {
    keep[t - 1] = 1;
  }
  return keep;
}

// The value under a key; none where it is missing or null.
const Json* find(const Json& line, std::string_view key) {
  const auto place = line.find(key);
  return place == line.end() || place->is_null() ? nullptr : &*place;
}

const Json& require(const Json& line, const char* key, DocumentForm form) {
  const Json* value = find(line, key);
  BIFOCAL_REQUIRE(value != nullptr, "[document] {} needs {} in the same line", name_of(form), key);
  return *value;
}

std::string names_of(const std::vector<DocumentForm>& forms) {
  std::string names;
  for (std::size_t i = 0; i < forms.size(); ++i) {
    names += i == 0 ? "" : (i + 1 < forms.size() ? ", " : " and ");
    names += name_of(forms[i]);
  }
  return names;
}

DocumentForm form_of(const Json& line) {
  std::vector<DocumentForm> forms;
  std::ranges::copy_if(kForms, std::back_inserter(forms), [&](DocumentForm form) {
    return find(line, name_of(form)) != nullptr;
  });
  BIFOCAL_REQUIRE(!forms.empty(),
                  "[document] a line needs one of messages, text, ids, prompt with completion, or "
                  "prompt_ids with answer_ids");
  BIFOCAL_REQUIRE(forms.size() == 1,
                  "[document] a line holds {}: which is the document? Choose with --form {}",
                  names_of(forms),
                  name_of(forms.front()));
  return forms.front();
}

Document read_ids(const Json& line) {
  Document document;
  document.ids = int32_array(require(line, "ids", DocumentForm::ids));
  const Json* keep = find(line, "keep");
  if (keep == nullptr) {
    document.keep = keep_before(0, document.ids.size());
    return document;
  }
  const std::vector<std::int32_t> values = int32_array(*keep);
  BIFOCAL_REQUIRE(values.size() == document.ids.size(),
                  "[document] keep needs one entry per token: {} tokens, {} entries",
                  document.ids.size(),
                  values.size());
  BIFOCAL_REQUIRE(std::ranges::all_of(values, [](auto value) { return value == 0 || value == 1; }),
                  "[document] keep holds 0 and 1 only");
  document.keep.assign(values.begin(), values.end());
  return document;
}

Document joined(std::vector<std::int32_t> prompt, const std::vector<std::int32_t>& answer) {
  const std::size_t begin = prompt.size();
  prompt.insert(prompt.end(), answer.begin(), answer.end());
  const std::size_t end = prompt.size();
  return {std::move(prompt), keep_before(begin, end)};
}

Document read_answer(const Json& line) {
  const Json& answer = require(line, "answer_ids", DocumentForm::answer_ids);
  return joined(int32_array(require(line, "prompt_ids", DocumentForm::answer_ids)),
                int32_array(answer));
}

}  // namespace

std::string_view name_of(DocumentForm form) {
  switch (form) {
    case DocumentForm::messages:
      return "messages";
    case DocumentForm::completion:
      return "completion";
    case DocumentForm::text:
      return "text";
    case DocumentForm::ids:
      return "ids";
    case DocumentForm::answer_ids:
      return "answer_ids";
    case DocumentForm::any:
      return "any";
  }
  return "any";
}

DocumentForm document_form(std::string_view name) {
  for (const DocumentForm form : kForms) {
    if (name == name_of(form)) {
      return form;
    }
  }
  BIFOCAL_REQUIRE(name == name_of(DocumentForm::any),
                  "[document] form {} is not known: wanted any, {}",
                  name,
                  names_of({kForms.begin(), kForms.end()}));
  return DocumentForm::any;
}

DocumentReader::DocumentReader(DocumentOptions options) : options_(std::move(options)) {
  if (options_.end_token.empty()) {
    return;
  }
  BIFOCAL_REQUIRE(options_.tokenizer != nullptr, "[document] an end token needs --tokenizer");
  const auto id = options_.tokenizer->find(options_.end_token);
  BIFOCAL_REQUIRE(id.has_value(),
                  "[document] the tokenizer has no token {}: check --end-token",
                  options_.end_token);
  end_ = {*id};
}

Document DocumentReader::read(std::string_view line) const {
  const Json json = parse_json_line(line);
  BIFOCAL_REQUIRE(
      json.is_object(), "[document] a line should hold an object, got {}", json.type_name());
  const DocumentForm form = options_.form == DocumentForm::any ? form_of(json) : options_.form;
  BIFOCAL_REQUIRE(form == DocumentForm::ids || find(json, "keep") == nullptr,
                  "[document] keep goes with ids, the line's form is {}",
                  name_of(form));
  Document document;
  switch (form) {
    case DocumentForm::messages:
      document = read_messages(json);
      break;
    case DocumentForm::completion:
      document = read_completion(json);
      break;
    case DocumentForm::text:
      document = read_text(json);
      break;
    case DocumentForm::ids:
      document = read_ids(json);
      break;
    case DocumentForm::answer_ids:
    case DocumentForm::any:
      document = read_answer(json);
      break;
  }
  if (!document.ids.empty()) {
    const auto [least, largest] = std::ranges::minmax(document.ids);
    BIFOCAL_REQUIRE(least >= 0 && largest < options_.vocabulary,
                    "[document] ids must be from 0 to {}, got {}: is the vocabulary another one?",
                    options_.vocabulary - 1,
                    least < 0 ? least : largest);
  }
  return document;
}

const ChatTemplate& DocumentReader::chat() const {
  BIFOCAL_REQUIRE(options_.tokenizer != nullptr, "[document] messages need --tokenizer");
  BIFOCAL_REQUIRE(options_.chat.has_value(),
                  "[document] messages need --chat-template: {}",
                  options_.no_chat_reason);
  return *options_.chat;
}

Document DocumentReader::read_messages(const Json& line) const {
  const Json& array = require(line, "messages", DocumentForm::messages);
  if (array.is_array() && array.empty()) {
    return {};
  }
  const ChatTemplate& written = chat();  // before the tokenizer is used: it may be missing
  ChatIds encoded = encode_chat(written, *options_.tokenizer, messages_of(array), false);
  return {std::move(encoded.ids), std::move(encoded.keep)};
}

// A conversation whose prompt is given: assistant turns of the prompt do not count.
Document DocumentReader::read_conversation(const Json& prompt, const Json& completion) const {
  const ChatTemplate& written = chat();  // before the tokenizer is used: it may be missing
  std::vector<Message> messages = messages_of(prompt);
  const auto asked = static_cast<std::size_t>(
      std::ranges::count(messages, std::string_view("assistant"), &Message::role));
  std::vector<Message> answers = messages_of(completion);
  BIFOCAL_REQUIRE(answers.front().role == "assistant",
                  "[document] a completion should begin with the assistant, got {}",
                  answers.front().role);
  std::ranges::move(answers, std::back_inserter(messages));
  ChatIds encoded = encode_chat(written, *options_.tokenizer, messages, false, asked);
  return {std::move(encoded.ids), std::move(encoded.keep)};
}

Document DocumentReader::read_completion(const Json& line) const {
  const Json& completion = require(line, "completion", DocumentForm::completion);
  const Json& prompt = require(line, "prompt", DocumentForm::completion);
  if (prompt.is_array() && completion.is_array()) {
    return read_conversation(prompt, completion);
  }
  const std::vector<std::int32_t> asked = encode(prompt, "prompt");
  std::vector<std::int32_t> answer = encode(completion, "completion");
  if (asked.empty() && answer.empty()) {
    return {};
  }
  std::vector<std::int32_t> ids = options_.tokenizer->prefix();
  ids.insert(ids.end(), asked.begin(), asked.end());
  answer.insert(answer.end(), end_.begin(), end_.end());
  return joined(std::move(ids), answer);
}

Document DocumentReader::read_text(const Json& line) const {
  const std::vector<std::int32_t> text = encode(require(line, "text", DocumentForm::text), "text");
  if (text.empty()) {
    return {};
  }
  std::vector<std::int32_t> ids = options_.tokenizer->prefix();
  ids.insert(ids.end(), text.begin(), text.end());
  ids.insert(ids.end(), end_.begin(), end_.end());
  const std::size_t size = ids.size();
  return {std::move(ids), keep_before(0, size)};
}

std::vector<std::int32_t> DocumentReader::encode(const Json& text, const char* key) const {
  BIFOCAL_REQUIRE(
      text.is_string(), "[document] {} should be a string, got {}", key, text.type_name());
  BIFOCAL_REQUIRE(options_.tokenizer != nullptr, "[document] {} needs --tokenizer", key);
  return options_.tokenizer->encode(text.get_ref<const std::string&>());
}

}  // namespace bifocal
