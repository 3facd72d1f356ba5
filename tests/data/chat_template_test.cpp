// Chat templates against transformers: texts, ids and the positions that count, of 200
// conversations.
#include "data/chat_template.h"

#include <cstdlib>
#include <fstream>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/sha256.h"
#include "data/json_lines.h"
#include "support/error_of.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

using Json = nlohmann::json;

const std::string kTests = BIFOCAL_SOURCE_DIR "/tests/data";

// Templates of our own; bifocal knows them by their hashes.
constexpr const char* kChatmlText =
    R"({%- for turn in messages %}{{ '<|im_start|>' ~ turn.role ~ '\n' ~ turn.content ~ '<|im_end|>\n' }})"
    R"({%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %})";
constexpr const char* kLlama3Text =
    R"({{ bos_token }}{%- for turn in messages %}{{ '<|start_header_id|>' ~ turn.role ~ '<|end_header_id|>\n\n')"
    R"( ~ turn.content | trim ~ '<|eot_id|>' }}{%- endfor %}{%- if add_generation_prompt %})"
    R"({{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %})";

using test::error_of;

std::vector<Json> conversations() {
  std::vector<Json> lines;
  for_each_json_line(kTests + "/chat/conversations.jsonl",
                     [&](const Json& line) { lines.push_back(line); });
  return lines;
}

// Runs [begin, end) of positions that count.
std::vector<std::pair<std::size_t, std::size_t>> runs_of(const std::vector<std::uint8_t>& keep) {
  std::vector<std::pair<std::size_t, std::size_t>> runs;
  for (std::size_t t = 0; t < keep.size(); ++t) {
    if (keep[t] == 0) {
      continue;
    }
    if (t > 0 && keep[t - 1] != 0) {
      runs.back().second = t + 1;
    } else {
      runs.emplace_back(t, t + 1);
    }
  }
  return runs;
}

void expect_ids_of_transformers(const std::string& name, const std::string& tokenizer_directory) {
  const ChatTemplate chat = ChatTemplate::named(name);
  const auto tokenizer = read_tokenizer(tokenizer_directory);
  int compared = 0;
  for (const Json& line : conversations()) {
    const Json& wanted = line.at(name);
    const std::vector<Message> messages = messages_of(line.at("messages"));
    const ChatIds chat_ids =
        encode_chat(chat, *tokenizer, messages, line.at("add_generation_prompt").get<bool>());
    ASSERT_EQ(Json(chat_ids.ids), wanted.at("ids")) << line.at("messages").dump();
    ASSERT_EQ(chat_ids.keep.size(), chat_ids.ids.size());
    ASSERT_EQ(Json(runs_of(chat_ids.keep)), wanted.at("keep")) << line.at("messages").dump();
    ++compared;
  }
  EXPECT_EQ(compared, 200);
}

void expect_hashes(const std::string& name, const std::string& key, const char* variable) {
  const char* directory = std::getenv(variable);
  if (directory == nullptr) {
    GTEST_SKIP() << variable << " names no directory with a tokenizer.json";
  }
  const ChatTemplate chat = ChatTemplate::named(name);
  const auto tokenizer = read_tokenizer(directory);
  for (const Json& line : conversations()) {
    const std::vector<Message> messages = messages_of(line.at("messages"));
    const ChatIds chat_ids =
        encode_chat(chat, *tokenizer, messages, line.at("add_generation_prompt").get<bool>());
    std::string text;
    for (const std::int32_t id : chat_ids.ids) {
      text += fmt::format("{}{}", text.empty() ? "" : " ", id);
    }
    text += '|';
    const char* separator = "";
    for (const auto& [begin, end] : runs_of(chat_ids.keep)) {
      text += fmt::format("{}{}-{}", separator, begin, end);
      separator = " ";
    }
    ASSERT_EQ(sha256_hex(text), line.at(key).get<std::string>()) << line.at("messages").dump();
  }
}

class ChatDirectory : public ::testing::Test {
 protected:
  void write_config(const Json& config) const {
    std::ofstream(directory_.path("tokenizer_config.json")) << config.dump();
  }

  void write_jinja(const std::string& text) const {
    std::ofstream(directory_.path("chat_template.jinja")) << text;
  }

  std::string name() const { return ChatTemplate::of_directory(directory_.path()).name(); }

  std::string refusal() const {
    return error_of([&] { ChatTemplate::of_directory(directory_.path()); });
  }

  test::TemporaryDirectory directory_;
};

TEST(ChatTemplateText, EqualsThatOfTransformers) {
  const std::vector<Json> lines = conversations();
  ASSERT_EQ(lines.size(), 200U);
  for (const std::string& name : ChatTemplate::names()) {
    const ChatTemplate chat = ChatTemplate::named(name);
    for (const Json& line : lines) {
      const std::vector<Message> messages = messages_of(line.at("messages"));
      const ChatText text = chat.render(messages, line.at("add_generation_prompt").get<bool>());
      ASSERT_EQ(sha256_hex(text.text), line.at(name).at("text_sha256"))
          << name << " " << line.at("messages").dump() << "\n"
          << text.text;
    }
  }
}

TEST(ChatTemplateText, RangesHoldContentsAndTheirEnds) {
  const std::vector<Message> messages{
      {"user", "2+2?"}, {"assistant", " 4\n"}, {"user", ""}, {"assistant", ""}};
  for (const std::string& name : ChatTemplate::names()) {
    const ChatTemplate chat = ChatTemplate::named(name);
    const ChatText text = chat.render(messages, false);
    ASSERT_EQ(text.assistant.size(), 2U);
    std::vector<std::string> found;
    for (const auto& [begin, end] : text.assistant) {
      found.push_back(
          text.text.substr(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)));
    }
    const std::string said = name == "llama3" ? "4" : " 4\n";
    EXPECT_EQ(found[0], said + chat.end_of_turn());
    EXPECT_EQ(found[1], chat.end_of_turn());
  }
}

TEST(ChatTemplateText, SystemPromptOfItsOwnInSmollm2Alone) {
  const std::vector<Message> plain{{"user", "hi"}};
  const std::vector<Message> given{{"system", ""}, {"user", "hi"}};
  const std::string turn = "<|im_start|>user\nhi<|im_end|>\n";
  EXPECT_EQ(ChatTemplate::named("chatml").render(plain, false).text, turn);
  const std::string text = ChatTemplate::named("smollm2").render(plain, false).text;
  EXPECT_TRUE(text.starts_with("<|im_start|>system\nYou are")) << text;
  EXPECT_TRUE(text.ends_with("<|im_end|>\n" + turn)) << text;
  EXPECT_EQ(ChatTemplate::named("smollm2").render(given, false).text,
            "<|im_start|>system\n<|im_end|>\n" + turn);
}

TEST(ChatTemplateText, RefusesUnknownNamesAndNoMessages) {
  EXPECT_NE(error_of([] { ChatTemplate::named("llama2"); }).find("chatml, smollm2 or llama3"),
            std::string::npos);
  const ChatTemplate chat = ChatTemplate::named("chatml");
  EXPECT_THROW(chat.render({}, true), Error);
  const std::vector<Message> tool{{"tool", "4"}};
  EXPECT_THROW(chat.render(tool, true), Error);
}

TEST(Messages, AreRolesAndTexts) {
  const auto messages = messages_of(Json::parse(
      R"([{"role":"system","content":""},{"role":"assistant","content":"a","tool_calls":[]}])"));
  ASSERT_EQ(messages.size(), 2U);
  EXPECT_EQ(messages[1].role, "assistant");
  EXPECT_EQ(messages[1].content, "a");
  for (const char* bad : {R"([])",
                          R"({"role":"user","content":"a"})",
                          R"(["hi"])",
                          R"([{"role":"tool","content":"a"}])",
                          R"([{"content":"a"}])",
                          R"([{"role":"user"}])",
                          R"([{"role":"user","content":null}])",
                          R"([{"role":"user","content":[{"type":"text","text":"a"}]}])",
                          R"([{"role":"assistant","content":"","tool_calls":[{"name":"f"}]}])"}) {
    EXPECT_NE(error_of([&] { messages_of(Json::parse(bad)); }).find("[messages]"),
              std::string::npos)
        << bad;
  }
}

TEST_F(ChatDirectory, KnowsTextsByTheirHashes) {
  write_config({{"chat_template", kChatmlText}});
  EXPECT_EQ(name(), "chatml");
  const Json other{{"name", "tool_use"}, {"template", "{{ tools }}"}};
  const Json plain{{"name", "default"}, {"template", kChatmlText}};
  write_config({{"chat_template", Json::array({other, plain})}});
  EXPECT_EQ(name(), "chatml");
  write_config({{"chat_template", "another one"}});
  write_jinja(std::string(kChatmlText) + "\n");  // the file wins, its last line break is none
  EXPECT_EQ(name(), "chatml");
}

TEST_F(ChatDirectory, Llama3NeedsItsFirstToken) {
  write_jinja(kLlama3Text);
  EXPECT_NE(refusal().find("<|begin_of_text|>"), std::string::npos) << refusal();
  write_config({{"bos_token", "<s>"}});
  EXPECT_NE(refusal().find("<s>"), std::string::npos) << refusal();
  write_config({{"bos_token", "<|begin_of_text|>"}});
  EXPECT_EQ(name(), "llama3");
  write_config({{"bos_token", {{"content", "<|begin_of_text|>"}}}});
  EXPECT_EQ(name(), "llama3");
}

TEST_F(ChatDirectory, RefusesOthersWithAReason) {
  EXPECT_NE(refusal().find("has no chat template"), std::string::npos) << refusal();
  write_config({{"chat_template", nullptr}});
  EXPECT_NE(refusal().find("has no chat template"), std::string::npos) << refusal();
  write_config({{"chat_template", "{% if enable_thinking %}"}});
  EXPECT_NE(refusal().find("thinking"), std::string::npos) << refusal();
  write_config({{"chat_template", "{{ date_string }}"}});
  EXPECT_NE(refusal().find("date"), std::string::npos) << refusal();
  write_config({{"chat_template", std::string(kChatmlText) + " "}});
  EXPECT_NE(refusal().find("unknown"), std::string::npos) << refusal();
  write_config(Json::array());
  EXPECT_NE(refusal().find("wanted a JSON object"), std::string::npos) << refusal();
  std::ofstream(directory_.path("tokenizer_config.json")) << "{";
  EXPECT_NE(refusal().find("wanted JSON"), std::string::npos) << refusal();
}

TEST(ChatIds, ChatmlEqualsTransformers) {
  expect_ids_of_transformers("chatml", kTests + "/tokenizers/qwen");
}

TEST(ChatIds, Smollm2EqualsTransformers) {
  expect_ids_of_transformers("smollm2", kTests + "/tokenizers/smollm2");
}

TEST(ChatIds, Llama3EqualsTransformers) {
  expect_ids_of_transformers("llama3", kTests + "/tokenizers/llama3");
}

TEST(ChatIds, WholeQwen3Tokenizer) {
  expect_hashes("chatml", "qwen3_sha256", "BIFOCAL_QWEN3_TOKENIZER");
}

TEST(ChatIds, WholeSmollm2Tokenizer) {
  expect_hashes("smollm2", "smollm2_sha256", "BIFOCAL_SMOLLM2");
}

TEST(ChatIds, Smollm2DirectoryIsKnown) {
  const char* directory = std::getenv("BIFOCAL_SMOLLM2");
  if (directory == nullptr) {
    GTEST_SKIP() << "BIFOCAL_SMOLLM2 names no directory";
  }
  EXPECT_EQ(ChatTemplate::of_directory(directory).name(), "smollm2");
}

}  // namespace
}  // namespace bifocal
