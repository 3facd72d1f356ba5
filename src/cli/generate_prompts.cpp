// Prompts of `bifocal generate` from the command line, files and standard input.
#include <fstream>
#include <iostream>
#include <iterator>

#include "cli/generate_command.h"
#include "core/file.h"
#include "data/json_lines.h"

namespace bifocal {

namespace {

constexpr const char* kStandardInput = "/dev/stdin";

class PromptReader {
 public:
  PromptReader(const GenerateCommand& command, const ModelFiles& files, std::int64_t vocabulary)
      : command_(command), files_(files), vocabulary_(vocabulary) {}

  std::vector<Prompt> read() {
    for (const std::string& text : command_.prompts) {
      add(next_id(), plain(text), false);
    }
    for (const std::string& text : command_.users) {
      add(next_id(), chat({{"user", text}}), true);
    }
    if (!command_.input.empty()) {
      std::int64_t lines = 0;
      for_each_json_line(path_of(command_.input), [&](const nlohmann::json& line) {
        if (command_.limit == 0 || lines++ < command_.limit) {
          add_line(line);
        }
      });
    }
    if (!command_.chat.empty()) {
      add_conversations(path_of(command_.chat));
    }
    return std::move(prompts_);
  }

 private:
  static std::string path_of(const std::string& name) {
    return name == "-" ? kStandardInput : name;
  }

  nlohmann::json next_id() const { return std::to_string(prompts_.size()); }

  std::vector<std::int32_t> plain(const std::string& text) const {
    std::vector<std::int32_t> ids = files_.tokenizer().prefix();
    const std::vector<std::int32_t> words = files_.tokenizer().encode(text);
    // A prompt of no words is a mistake even where a prefix would make tokens of it.
    return words.empty() ? words : (ids.insert(ids.end(), words.begin(), words.end()), ids);
  }

  std::vector<std::int32_t> chat(std::vector<Message> messages) const {
    if (!command_.system.empty() && messages.front().role != "system") {
      messages.insert(messages.begin(), {"system", command_.system});
    }
    BIFOCAL_REQUIRE(messages.back().role != "assistant",
                    "[generate] a conversation ends with the assistant: nothing is left to answer");
    return encode_chat(files_.chat_template(), files_.tokenizer(), messages, true).ids;
  }

  void add(const nlohmann::json& id, std::vector<std::int32_t> ids, bool is_chat) {
    BIFOCAL_REQUIRE(
        !ids.empty(), "[generate] prompt {} is empty: give at least one token", id.dump());
    for (const std::int32_t token : ids) {
      BIFOCAL_REQUIRE(token >= 0 && token < vocabulary_,
                      "[generate] prompt {}: wanted ids from 0 to {}, got {}: is the tokenizer the "
                      "model's own?",
                      id.dump(),
                      vocabulary_ - 1,
                      token);
    }
    prompts_.push_back({id, std::move(ids), is_chat});
  }

  void add_line(const nlohmann::json& line) {
    BIFOCAL_REQUIRE(line.is_object(), "[generate] wanted an object, got {}", line.type_name());
    const nlohmann::json id = line.contains("id") ? line.at("id") : next_id();
    if (line.contains("prompt_ids")) {
      add(id, int32_array(line.at("prompt_ids")), false);
    } else if (line.contains("messages")) {
      add(id, chat(messages_of(line.at("messages"))), true);
    } else {
      BIFOCAL_REQUIRE(line.contains("prompt"),
                      "[generate] wanted prompt_ids, messages or prompt, got neither");
      BIFOCAL_REQUIRE(line.at("prompt").is_string(),
                      "[generate] prompt: wanted a text, got {}",
                      line.at("prompt").type_name());
      add(id, plain(line.at("prompt").get<std::string>()), false);
    }
  }

  // One array (of messages, or of objects with messages), or lines of such objects.
  void add_conversations(const std::string& path) {
    std::ifstream file(path);
    BIFOCAL_REQUIRE(file.good(), "[generate] cannot open {}: check the path of --chat", path);
    const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    const nlohmann::json whole = nlohmann::json::parse(text, nullptr, false);
    if (whole.is_array()) {
      const bool is_one = !whole.empty() && whole.front().contains("role");
      for (const nlohmann::json& one : is_one ? nlohmann::json::array({whole}) : whole) {
        add_conversation(is_one ? nlohmann::json{{"messages", one}} : one, path);
      }
      return;
    }
    std::size_t number = 0;
    for (std::size_t begin = 0; begin < text.size(); ++number) {
      const std::size_t end = std::min(text.find('\n', begin), text.size());
      const std::string line = text.substr(begin, end - begin);
      begin = end + 1;
      if (line.find_first_not_of(" \t\r") != std::string::npos) {
        const std::string where = fmt::format("{}:{}", path, number + 1);
        add_conversation(nlohmann::json::parse(line, nullptr, false), where);
      }
    }
  }

  void add_conversation(const nlohmann::json& object, const std::string& where) {
    BIFOCAL_REQUIRE(object.is_object() && object.contains("messages"),
                    "[generate] {}: wanted {{\"messages\": [..]}}, or one JSON array of messages",
                    where);
    if (command_.limit > 0 && conversations_++ >= command_.limit) {
      return;
    }
    try {
      add_line(object);
    } catch (const Error& error) {
      fail("{} ({})", error.what(), where);
    }
  }

  const GenerateCommand& command_;
  const ModelFiles& files_;
  std::int64_t vocabulary_;
  std::int64_t conversations_ = 0;
  std::vector<Prompt> prompts_;
};

}  // namespace

std::vector<Prompt> read_prompts(const GenerateCommand& command,
                                 const ModelFiles& files,
                                 std::int64_t vocabulary) {
  BIFOCAL_REQUIRE(command.input != "-" || command.chat != "-",
                  "[generate] --input and --chat cannot both read standard input");
  std::vector<Prompt> prompts = PromptReader(command, files, vocabulary).read();
  BIFOCAL_REQUIRE(!prompts.empty(),
                  "[generate] no prompts: give --prompt, --user, --input, --chat or --interactive");
  BIFOCAL_REQUIRE(command.system.empty() || std::ranges::any_of(prompts, &Prompt::is_chat),
                  "[generate] --system is for chats, and no prompt is one: leave it out");
  return prompts;
}

}  // namespace bifocal
