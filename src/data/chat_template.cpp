#include "data/chat_template.h"

#include <algorithm>
#include <array>
#include <optional>

#include <fmt/format.h>

#include "core/error.h"
#include "core/file.h"
#include "core/sha256.h"

namespace bifocal {
namespace {

constexpr std::array<std::string_view, 3> kRoles{"system", "user", "assistant"};
constexpr std::array<std::string_view, 3> kNames{"chatml", "smollm2", "llama3"};

// What SmolLM2-Instruct's template says where the conversation has no system message.
constexpr std::string_view kSmollm2System =
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face";

constexpr std::string_view kLlama3Begin = "<|begin_of_text|>";

struct KnownText {
  std::string_view sha256;
  std::string_view name;
};

// SHA-256 of template texts. A text exists with line breaks in its string literals or with \n
// written out, and with or without a first clause that defaults add_generation_prompt.
constexpr std::array<KnownText, 14> kKnownTexts{{
    // Qwen3-4B-Instruct-2507, and the other Instruct-2507 models.
    {"64f85b198065d0fba2a81f37e10ed68161ce2c19a754c7100e67e0ca2ee9c326", "chatml"},
    // Plain ChatML, one line or several.
    {"153280e3ff55d19da1398bdb3914ee2a51b80429bfaedde11d7d216c39db80f3", "chatml"},
    {"fcf7a096fe99a48fd9ad2b250bf9237e96e8f48bffec1c7ea4d3f225176cd40e", "chatml"},
    {"58c1a1f04baa7adaeaba1f90267c3d57d9396f0c1f0129bdde9e76d3c6784af7", "chatml"},
    {"d7b5b8c7b58f7a6bf868aa46a5f73ee976d7292f40fcb9c3e7a1defd8d235cfb", "chatml"},
    {"48207306f75c7af7b699867a4271e409a0322d49454c8afc868d81ecbc247933", "chatml"},
    // Written here; the tests use them.
    {"b6004c9415bfb04402a87d6578c5f1fda3597d5a3e2b766c158afac092a95ab8", "chatml"},
    {"e0094ac7ed2d8f55b6de3d7d691417739a40afd494d5171095032770b4c222a9", "llama3"},
    // SmolLM2-135M, 360M and 1.7B-Instruct, repository and GGUF alike.
    {"872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788", "smollm2"},
    {"de9cde7d1b0ca0cc87459a6673e0d12fb89c070bdb24e4a30b6e4d187b226221", "smollm2"},
    // Meta-Llama-3-8B and 70B-Instruct.
    {"ba03a121d097859c7b5b9cd03af99aafe95275210d2876f642ad9929a150f122", "llama3"},
    {"4f46ecd43418f216df8c26936c60e5d04bcc81db47db5d86fbe889f64212dd4c", "llama3"},
    {"47d5a7b4840c2ff2dfa0828b2465a654bef3a6cdfe032e5e105f395e4ceee812", "llama3"},
    {"25d9364ce09288ed874ade392dfd082b81d3ea3b4d887f008fdcfd8427c7186b", "llama3"},
}};

std::string joined_names() {
  return fmt::format("{}, {} or {}", kNames[0], kNames[1], kNames[2]);
}

// Why the text is none of ours, by what such templates are known to contain.
std::string_view other_kind(std::string_view text) {
  const auto has = [&](std::string_view part) { return text.find(part) != std::string_view::npos; };
  if (has("enable_thinking") || has("</think>")) {
    return "it adds or removes thinking blocks in assistant turns, so that a turn's text depends "
           "on later ones";
  }
  if (has("date_string") || has("strftime_now")) {
    return "it puts the date into the system message";
  }
  return "its text is unknown";
}

nlohmann::json read_json(const std::filesystem::path& path) {
  try {
    return nlohmann::json::parse(read_file(path));
  } catch (const nlohmann::json::exception& error) {
    fail("[{}] wanted JSON: {}", path.string(), error.what());
  }
}

// The text of "chat_template": a string, or the one named default of a list.
std::optional<std::string> text_of(const nlohmann::json& field) {
  if (field.is_string()) {
    return field.get<std::string>();
  }
  if (!field.is_array()) {
    return std::nullopt;
  }
  for (const nlohmann::json& entry : field) {
    if (entry.is_object() && entry.value("name", nlohmann::json()) == "default" &&
        entry.contains("template") && entry["template"].is_string()) {
      return entry["template"].get<std::string>();
    }
  }
  return std::nullopt;
}

// Length in bytes of the white space that text starts with, as Python's str.strip sees it.
std::size_t leading_space(std::string_view text) {
  constexpr std::array<std::string_view, 19> kWide{"\xC2\x85",
                                                   "\xC2\xA0",
                                                   "\xE1\x9A\x80",
                                                   "\xE2\x80\x80",
                                                   "\xE2\x80\x81",
                                                   "\xE2\x80\x82",
                                                   "\xE2\x80\x83",
                                                   "\xE2\x80\x84",
                                                   "\xE2\x80\x85",
                                                   "\xE2\x80\x86",
                                                   "\xE2\x80\x87",
                                                   "\xE2\x80\x88",
                                                   "\xE2\x80\x89",
                                                   "\xE2\x80\x8A",
                                                   "\xE2\x80\xA8",
                                                   "\xE2\x80\xA9",
                                                   "\xE2\x80\xAF",
                                                   "\xE2\x81\x9F",
                                                   "\xE3\x80\x80"};
  if (text.empty()) {
    return 0;
  }
  const char first = text.front();
  if (first == ' ' || (first >= '\t' && first <= '\r') || (first >= '\x1C' && first <= '\x1F')) {
    return 1;
  }
  const auto* found =
      std::ranges::find_if(kWide, [&](std::string_view space) { return text.starts_with(space); });
  return found == kWide.end() ? 0 : found->size();
}

std::string_view trim(std::string_view text) {
  while (const std::size_t bytes = leading_space(text)) {
    text.remove_prefix(bytes);
  }
  while (!text.empty()) {
    // Back to the first byte of the last character.
    std::size_t last = text.size() - 1;
    while (last > 0 && (static_cast<unsigned char>(text[last]) & 0xC0U) == 0x80U) {
      --last;
    }
    if (leading_space(text.substr(last)) != text.size() - last) {
      break;
    }
    text.remove_suffix(text.size() - last);
  }
  return text;
}

// Appends content and its closing token; notes their place where an assistant wrote them.
void append_turn(ChatText& chat,
                 const Message& message,
                 std::string_view content,
                 std::string_view end_of_turn) {
  const auto begin = static_cast<std::int64_t>(chat.text.size());
  chat.text.append(content);
  chat.text.append(end_of_turn);
  if (message.role == "assistant") {
    chat.assistant.emplace_back(begin, static_cast<std::int64_t>(chat.text.size()));
  }
}

ChatText render_chatml(std::span<const Message> messages,
                       std::string_view default_system,
                       std::string_view end_of_turn,
                       bool add_generation_prompt) {
  ChatText chat;
  if (!default_system.empty() && messages.front().role != "system") {
    chat.text = fmt::format("<|im_start|>system\n{}{}\n", default_system, end_of_turn);
  }
  for (const Message& message : messages) {
    chat.text += fmt::format("<|im_start|>{}\n", message.role);
    append_turn(chat, message, message.content, end_of_turn);
    chat.text += '\n';
  }
  if (add_generation_prompt) {
    chat.text += "<|im_start|>assistant\n";
  }
  return chat;
}

ChatText render_llama3(std::span<const Message> messages,
                       std::string_view end_of_turn,
                       bool add_generation_prompt) {
  ChatText chat{.text = std::string(kLlama3Begin), .assistant = {}};
  for (const Message& message : messages) {
    chat.text += fmt::format("<|start_header_id|>{}<|end_header_id|>\n\n", message.role);
    append_turn(chat, message, trim(message.content), end_of_turn);
  }
  if (add_generation_prompt) {
    chat.text += "<|start_header_id|>assistant<|end_header_id|>\n\n";
  }
  return chat;
}

// The ranges as bytes of normalize(text). Each piece between their bounds is normalised by itself:
// before a bound stands a line break or the end of a token, which compose with nothing.
std::vector<std::pair<std::int64_t, std::int64_t>> normalized_ranges(const Tokenizer& tokenizer,
                                                                     const ChatText& chat) {
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
  std::int64_t read = 0;
  std::int64_t written = 0;
  const auto advance = [&](std::int64_t to) {
    const auto piece = std::string_view(chat.text).substr(static_cast<std::size_t>(read),
                                                          static_cast<std::size_t>(to - read));
    written += static_cast<std::int64_t>(tokenizer.normalize(piece).size());
    read = to;
    return written;
  };
  for (const auto& [begin, end] : chat.assistant) {
    const std::int64_t first = advance(begin);
    ranges.emplace_back(first, advance(end));
  }
  return ranges;
}

}  // namespace

std::vector<Message> messages_of(const nlohmann::json& array) {
  BIFOCAL_REQUIRE(array.is_array() && !array.empty(),
                  "[messages] wanted an array of at least one {{\"role\", \"content\"}}, came {}",
                  array.is_array() ? "an empty one" : array.type_name());
  std::vector<Message> messages;
  for (const nlohmann::json& entry : array) {
    const std::size_t index = messages.size();
    BIFOCAL_REQUIRE(entry.is_object(), "[messages] entry {} is no object", index);
    const nlohmann::json role = entry.value("role", nlohmann::json());
    BIFOCAL_REQUIRE(
        role.is_string() && std::ranges::find(kRoles, role.get<std::string>()) != kRoles.end(),
        "[messages] entry {}: wanted the role system, user or assistant, came {}",
        index,
        role.dump());
    const nlohmann::json content = entry.value("content", nlohmann::json());
    BIFOCAL_REQUIRE(content.is_string(),
                    "[messages] entry {}: wanted a text as content, came {}",
                    index,
                    content.type_name());
    const nlohmann::json calls = entry.value("tool_calls", nlohmann::json());
    BIFOCAL_REQUIRE(calls.empty(),
                    "[messages] entry {} has tool_calls, which no template here can write; put "
                    "them into its content",
                    index);
    messages.push_back({role.get<std::string>(), content.get<std::string>()});
  }
  return messages;
}

std::vector<std::string> ChatTemplate::names() {
  return {kNames.begin(), kNames.end()};
}

ChatTemplate ChatTemplate::named(std::string_view name) {
  BIFOCAL_REQUIRE(std::ranges::find(kNames, name) != kNames.end(),
                  "[chat template] wanted {}, came '{}'",
                  joined_names(),
                  name);
  return ChatTemplate(std::string(name));
}

ChatTemplate ChatTemplate::of_directory(const std::filesystem::path& directory) {
  const std::filesystem::path own = directory / "chat_template.jinja";
  const std::filesystem::path config = directory / "tokenizer_config.json";
  const nlohmann::json settings =
      std::filesystem::exists(config) ? read_json(config) : nlohmann::json::object();
  BIFOCAL_REQUIRE(settings.is_object(),
                  "[{}] wanted a JSON object, came {}",
                  config.string(),
                  settings.type_name());
  // transformers lets the file of its own win.
  const std::optional<std::string> found =
      std::filesystem::exists(own) ? std::optional(read_file(own))
                                   : text_of(settings.value("chat_template", nlohmann::json()));
  BIFOCAL_REQUIRE(found,
                  "[{}] has no chat template (chat_template.jinja, or chat_template in "
                  "tokenizer_config.json); name one: {}",
                  directory.string(),
                  joined_names());
  std::string_view text = *found;
  if (text.ends_with('\n')) {
    text.remove_suffix(1);  // as Jinja does
  }
  const std::string hash = sha256_hex(text);
  const auto* known = std::ranges::find(kKnownTexts, hash, &KnownText::sha256);
  BIFOCAL_REQUIRE(known != kKnownTexts.end(),
                  "[{}] has a chat template that bifocal does not write (SHA-256 {}): {}. If its "
                  "conversations look like those of {}, name that one",
                  directory.string(),
                  hash,
                  other_kind(text),
                  joined_names());
  if (known->name == "llama3") {
    nlohmann::json bos = settings.value("bos_token", nlohmann::json());
    if (bos.is_object()) {
      bos = bos.value("content", nlohmann::json());
    }
    BIFOCAL_REQUIRE(bos == kLlama3Begin,
                    "[{}] its chat template starts with bos_token: wanted {}, came {}",
                    directory.string(),
                    kLlama3Begin,
                    bos.dump());
  }
  return named(known->name);
}

std::string ChatTemplate::end_of_turn() const {
  return name_ == "llama3" ? "<|eot_id|>" : "<|im_end|>";
}

ChatText ChatTemplate::render(std::span<const Message> messages, bool add_generation_prompt) const {
  BIFOCAL_REQUIRE(!messages.empty(), "[chat template] wanted at least one message, came none");
  for (const Message& message : messages) {
    BIFOCAL_REQUIRE(std::ranges::find(kRoles, message.role) != kRoles.end(),
                    "[chat template] wanted the role system, user or assistant, came '{}'",
                    message.role);
  }
  if (name_ == "llama3") {
    return render_llama3(messages, end_of_turn(), add_generation_prompt);
  }
  return render_chatml(messages,
                       name_ == "smollm2" ? kSmollm2System : std::string_view(),
                       end_of_turn(),
                       add_generation_prompt);
}

ChatIds encode_chat(const ChatTemplate& chat,
                    const Tokenizer& tokenizer,
                    std::span<const Message> messages,
                    bool add_generation_prompt,
                    std::size_t first_counted) {
  const ChatText text = chat.render(messages, add_generation_prompt);
  Encoding encoding = tokenizer.encode_with_ends(text.text);
  const auto ranges = normalized_ranges(tokenizer, text);

  ChatIds result{.ids = std::move(encoding.ids), .keep = {}};
  result.keep.assign(result.ids.size(), 0);
  BIFOCAL_ASSERT(first_counted <= ranges.size());
  auto range = ranges.begin() + static_cast<std::ptrdiff_t>(first_counted);
  for (std::size_t token = 1; token < result.ids.size(); ++token) {
    const std::int64_t begin = encoding.ends[token - 1];
    const std::int64_t end = encoding.ends[token];
    while (range != ranges.end() && range->second <= begin) {
      ++range;
    }
    if (range != ranges.end() && range->first < end) {
      result.keep[token - 1] = 1;
    }
  }
  return result;
}

}  // namespace bifocal
