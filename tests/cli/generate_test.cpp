// `bifocal generate` from outside: prompts of every kind, chats, what ends an answer, and errors.
#include <array>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <sys/wait.h>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/file.h"
#include "data/chat_template.h"
#include "data/tokenizer.h"
#include "support/temporary_directory.h"

namespace bifocal::test {

namespace {

namespace fs = std::filesystem;

const std::string kTokenizers = BIFOCAL_SOURCE_DIR "/tests/data/tokenizers/";

struct Outcome {
  int exit_code = -1;
  std::string out, err;

  std::vector<nlohmann::json> lines() const {
    std::vector<nlohmann::json> all;
    std::istringstream stream(out);
    for (std::string line; std::getline(stream, line);) {
      all.push_back(nlohmann::json::parse(line));
    }
    return all;
  }
};

// A directory with a tiny model of random weights (none are stored) beside a byte-level tokenizer
// that knows <|im_end|>, and what a run of the program gives.
class GenerateCommandTest : public testing::Test {
 protected:
  GenerateCommandTest() : tokenizer_(read_tokenizer(kTokenizers + "smollm2")) {
    fs::copy_file(kTokenizers + "smollm2/tokenizer.json", path("model/tokenizer.json"));
    config_ = {{"model_type", "llama"},
               {"hidden_size", 16},
               {"intermediate_size", 24},
               {"num_hidden_layers", 2},
               {"num_attention_heads", 2},
               {"num_key_value_heads", 1},
               {"vocab_size", tokenizer_->vocabulary()},
               {"max_position_embeddings", 256},
               {"rope_theta", 10000.0},
               {"rms_norm_eps", 1e-5},
               {"hidden_act", "silu"},
               {"tie_word_embeddings", false},
               {"eos_token_id", nullptr}};
    write_config();
  }

  std::string path(const std::string& name) {
    const fs::path whole = directory_.path(name);
    fs::create_directories(whole.parent_path());
    return whole.string();
  }

  void write(const std::string& name, const std::string& text) {
    std::ofstream(path(name)) << text;
  }

  void write_config() { write("model/config.json", config_.dump()); }

  Outcome run(const std::string& arguments, const std::string& input = "") {
    write("input", input);
    const std::string line = "OMP_NUM_THREADS=1 \"" BIFOCAL_BINARY "\" generate " + arguments +
                             " < " + path("input") + " > " + path("out") + " 2> " + path("err");
    const int status = std::system(line.c_str());
    Outcome outcome{WIFEXITED(status) ? WEXITSTATUS(status) : -1,
                    read_file(path("out")),
                    read_file(path("err"))};
    return outcome;
  }

  // With the model and answers of a few tokens.
  Outcome answer(const std::string& arguments, const std::string& input = "", int tokens = 4) {
    return run("--model " + path("model") + " --max-new-tokens " + std::to_string(tokens) + " " +
                   arguments,
               input);
  }

  void expect_error(const Outcome& outcome, const std::string& part) {
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_NE(outcome.err.find("bifocal: error"), std::string::npos) << outcome.err;
    EXPECT_NE(outcome.err.find(part), std::string::npos) << outcome.err;
  }

  std::vector<std::int32_t> chat_ids(const std::vector<Message>& messages) {
    return encode_chat(ChatTemplate::named("smollm2"), *tokenizer_, messages, true).ids;
  }

  TemporaryDirectory directory_;
  std::unique_ptr<Tokenizer> tokenizer_;
  nlohmann::json config_;
};

TEST_F(GenerateCommandTest, WritesALineForEachPromptInOrder) {
  const Outcome outcome = answer("--prompt 'one two' --prompt three --batch 1 --tokenizer " +
                                 kTokenizers + "smollm2/tokenizer.json");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto lines = outcome.lines();
  ASSERT_EQ(lines.size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    const auto ids = lines[i].at("answer_ids").get<std::vector<std::int32_t>>();
    EXPECT_EQ(lines[i].at("id"), std::to_string(i));
    EXPECT_EQ(ids.size(), 4U);
    EXPECT_EQ(lines[i].at("answer"), tokenizer_->decode(ids, true));
    EXPECT_EQ(lines[i].at("answer_tokens"), 4);
    EXPECT_EQ(lines[i].at("finish_reason"), "length");
    EXPECT_GT(lines[i].at("seconds"), 0.0);
    EXPECT_GT(lines[i].at("tokens_per_second"), 0.0);
  }
  EXPECT_EQ(lines[0].at("prompt_tokens"), tokenizer_->encode("one two").size());
  EXPECT_NE(outcome.err.find("at the end: cache "), std::string::npos) << outcome.err;
}

// Llama 3's <|begin_of_text|> stands before a plain prompt; a chat template writes it itself.
TEST_F(GenerateCommandTest, APrefixStandsBeforePlainPromptsAlone) {
  const std::unique_ptr<Tokenizer> llama = read_tokenizer(kTokenizers + "llama3");
  ASSERT_EQ(llama->prefix().size(), 1U);
  config_["vocab_size"] = llama->vocabulary();
  write_config();
  const auto lines = answer("--chat-template llama3 --prompt hello --user hello --tokenizer " +
                            kTokenizers + "llama3/tokenizer.json")
                         .lines();
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(lines[0].at("prompt_tokens"), llama->encode("hello").size() + 1);
  const std::vector<Message> user = {{"user", "hello"}};
  EXPECT_EQ(lines[1].at("prompt_tokens"),
            encode_chat(ChatTemplate::named("llama3"), *llama, user, true).ids.size());
}

// The same tokens by every way in.
TEST_F(GenerateCommandTest, TextsIdsMessagesAndChatsAreTheSamePrompts) {
  const std::vector<std::int32_t> plain = tokenizer_->encode("hello there");
  const std::vector<Message> messages = {{"system", "Be brief."}, {"user", "Hi!"}};
  const nlohmann::json array = {{{"role", "system"}, {"content", "Be brief."}},
                                {{"role", "user"}, {"content", "Hi!"}}};
  const std::vector<nlohmann::json> input = {{{"id", "a"}, {"prompt", "hello there"}},
                                             {{"id", 7}, {"prompt_ids", plain}},
                                             {{"messages", array}},
                                             {{"prompt_ids", chat_ids(messages)}}};
  std::string text;
  for (const nlohmann::json& line : input) {
    text += line.dump() + "\n\n";
  }
  const std::string chat = "--chat-template smollm2 ";
  const Outcome all = answer(chat + "--input -", text);
  ASSERT_EQ(all.exit_code, 0) << all.err;
  const auto lines = all.lines();
  ASSERT_EQ(lines.size(), 4U);
  EXPECT_EQ(lines[0].at("id"), "a");
  EXPECT_EQ(lines[1].at("id"), 7);
  EXPECT_EQ(lines[2].at("id"), "2");
  EXPECT_EQ(lines[0].at("answer_ids"), lines[1].at("answer_ids"));
  EXPECT_EQ(lines[2].at("answer_ids"), lines[3].at("answer_ids"));
  EXPECT_EQ(lines[2].at("prompt_tokens"), chat_ids(messages).size());
  EXPECT_EQ(answer(chat + "--input - --limit 2", text).lines().size(), 2U);
  write("one.json", array.dump(2));
  write("lines.jsonl", input[2].dump() + "\n" + input[2].dump() + "\n");
  const auto one = answer(chat + "--chat " + path("one.json")).lines();
  ASSERT_EQ(one.size(), 1U);
  EXPECT_EQ(one[0].at("answer_ids"), lines[2].at("answer_ids"));
  const auto two = answer(chat + "--chat - --limit 1", read_file(path("lines.jsonl"))).lines();
  ASSERT_EQ(two.size(), 1U);
  EXPECT_EQ(two[0].at("answer_ids"), lines[2].at("answer_ids"));
  EXPECT_EQ(answer(chat + "--chat " + path("lines.jsonl")).lines().size(), 2U);
  const auto user = answer(chat + "--system 'Be brief.' --user 'Hi!'").lines();
  ASSERT_EQ(user.size(), 1U);
  EXPECT_EQ(user[0].at("answer_ids"), lines[2].at("answer_ids"));
}

TEST_F(GenerateCommandTest, StreamsOneAnswerAsText) {
  const Outcome text = answer("--prompt hello --text");
  ASSERT_EQ(text.exit_code, 0) << text.err;
  const Outcome json = answer("--prompt hello");
  EXPECT_EQ(text.out, json.lines().at(0).at("answer").get<std::string>() + "\n");
  expect_error(answer("--prompt a --prompt b --text"), "--text shows one answer");
}

// The model's own ends: generation_config.json before config.json, an id or a list; --stop-id and
// --stop in their place; --ignore-eos.
TEST_F(GenerateCommandTest, AnswersEndAtStopTokens) {
  const auto free = answer("--prompt hello").lines().at(0).at("answer_ids");
  const auto expect_stop = [&](const std::string& arguments, std::size_t length) {
    const auto line = answer("--prompt hello " + arguments).lines().at(0);
    EXPECT_EQ(line.at("answer_ids").size(), length) << arguments;
    EXPECT_EQ(line.at("finish_reason"), length < 4 ? "stop" : "length") << arguments;
  };
  const std::int32_t first = free.at(0);
  std::size_t other = 1;
  while (other < 3 && free.at(other) == first) {
    ++other;
  }
  ASSERT_LT(other, 3U) << "random weights that repeat themselves test nothing";
  expect_stop("--stop-id " + free.at(other).dump(), other + 1);
  config_["eos_token_id"] = free.at(other);
  write_config();
  expect_stop("", other + 1);
  expect_stop("--ignore-eos", 4);
  expect_stop("--stop-id " + std::to_string(first), 1);
  write("model/generation_config.json", nlohmann::json{{"eos_token_id", {2, first}}}.dump());
  expect_stop("", 1);
  expect_stop("--stop '<|im_end|>'", 4);
  expect_error(answer("--prompt hello --stop 'no such token'"), "is no token of the vocabulary");
  write("model/generation_config.json", R"({"eos_token_id": "end"})");
  expect_error(answer("--prompt hello"), "eos_token_id: wanted an id");
}

TEST_F(GenerateCommandTest, DrawsFollowTheSeedAndTheModelsDefaults) {
  const auto ids = [&](const std::string& arguments) {
    const Outcome outcome = answer("--prompt hello " + arguments, "", 12);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return outcome.lines().at(0).at("answer_ids");
  };
  EXPECT_EQ(ids("--temperature 1 --seed 1"), ids("--temperature 1 --seed 1"));
  EXPECT_NE(ids("--temperature 1 --seed 1"), ids("--temperature 1 --seed 2"));
  EXPECT_EQ(ids("--sample --seed 1"), ids("--temperature 1 --seed 1"));
  write("model/generation_config.json", R"({"temperature": 0.5, "top_k": 3, "top_p": 0.9})");
  EXPECT_EQ(ids("--sample"), ids("--temperature 0.5 --top-k 3 --top-p 0.9"));
  EXPECT_EQ(ids("--sample --top-k 1"), ids(""));
  const auto samples = answer("--prompt hello --prompt bye --samples 3 --temperature 1").lines();
  ASSERT_EQ(samples.size(), 6U);
  EXPECT_EQ(samples[4].at("id"), "1");
  EXPECT_EQ(samples[4].at("sample"), 1);
  EXPECT_NE(samples[0].at("answer_ids"), samples[1].at("answer_ids"));
  expect_error(answer("--prompt a --top-k 5"), "a temperature of 0 draws nothing");
  expect_error(answer("--prompt a --samples 2"), "would all be the same");
}

// What one prompt would answer: the turns before, with what the model said to them.
TEST_F(GenerateCommandTest, AConversationGoesOnFromTurnToTurn) {
  const std::string chat = "--chat-template smollm2 ";
  const Outcome talk =
      answer(chat + "--interactive", "first\n\nsecond\n/reset\nsecond\n/quit\nx\n");
  ASSERT_EQ(talk.exit_code, 0) << talk.err;
  const auto alone = [&](const std::vector<std::int32_t>& ids) {
    write("ids.jsonl", nlohmann::json{{"prompt_ids", ids}}.dump());
    return answer(chat + "--stop '<|im_end|>' --input " + path("ids.jsonl")).lines().at(0);
  };
  const auto first = alone(chat_ids({{"user", "first"}}));
  std::vector<std::int32_t> ids = chat_ids({{"user", "first"}});
  for (const std::int32_t id : first.at("answer_ids").get<std::vector<std::int32_t>>()) {
    ids.push_back(id);
  }
  if (first.at("finish_reason") == "length") {
    ids.push_back(*tokenizer_->find("<|im_end|>"));
  }
  for (const std::int32_t id :
       tokenizer_->encode("\n<|im_start|>user\nsecond<|im_end|>\n<|im_start|>assistant\n")) {
    ids.push_back(id);
  }
  const auto second = alone(ids);
  const auto fresh = alone(chat_ids({{"user", "second"}}));
  EXPECT_EQ(talk.out,
            first.at("answer").get<std::string>() + "\n" + second.at("answer").get<std::string>() +
                "\n" + fresh.at("answer").get<std::string>() + "\n");
  expect_error(answer(chat + "--interactive --prompt a"), "--interactive reads turns");
}

TEST_F(GenerateCommandTest, EveryPresetSpeaksPastTheMaximumPosition) {
  config_["max_position_embeddings"] = 32;
  write_config();
  const std::string preset_run = "--prompt hello --max-new-tokens 60 ";
  for (const char* preset : {"swa_learned_sink", "swa_sink_tokens", "bifocal", "bifocal_query"}) {
    const Outcome outcome = run(preset_run + "--teacher.path " + path("model") +
                                " --student.budget 40 --student.preset " + preset);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_EQ(outcome.lines().at(0).at("answer_tokens"), 60);
    EXPECT_EQ(outcome.err.find("warning"), std::string::npos) << outcome.err;
  }
  const Outcome outcome = answer("--prompt hello", "", 60);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const std::size_t found = outcome.err.find("warning: [generate] 33 tokens");
  EXPECT_NE(found, std::string::npos) << outcome.err;
  EXPECT_EQ(outcome.err.find("warning", found + 10), std::string::npos) << outcome.err;
  write("long.jsonl", nlohmann::json{{"prompt_ids", std::vector<int>(50, 5)}}.dump());
  EXPECT_NE(answer("--input " + path("long.jsonl")).err.find("warning: [generate] 50 tokens"),
            std::string::npos);
}

TEST_F(GenerateCommandTest, RefusedCommandsLeaveEarlierAnswersAlone) {
  write("kept", "old");
  expect_error(answer("--prompt a --top-k 5 --output " + path("kept")), "draws nothing");
  EXPECT_EQ(read_file(path("kept")), "old");
}

TEST_F(GenerateCommandTest, ErrorsNameThePromptAndTheWayOut) {
  expect_error(answer("--prompt a --system b"), "--system is for chats");
  expect_error(answer(""), "no prompts");
  expect_error(answer("--prompt ''"), "prompt \"0\" is empty");
  expect_error(answer("--input -", R"({"id": 3, "prompt_ids": []})"), "prompt 3 is empty");
  expect_error(answer("--input -", R"({"id": 3, "prompt_ids": [100000]})"), "got 100000");
  expect_error(answer("--input -", R"({"id": 3, "prompt_ids": [-1]})"), "got -1");
  expect_error(answer("--input -", R"({"id": 3})"), "wanted prompt_ids, messages or prompt");
  expect_error(answer("--input -", "[1]"), "wanted an object");
  expect_error(answer("--input -", R"({"prompt": 5})"), "wanted a text, got number");
  expect_error(answer("--input -", "{"), "/dev/stdin:1");
  expect_error(answer("--input " + path("missing")), "cannot open");
  expect_error(answer("--chat " + path("missing")), "cannot open");
  expect_error(answer("--chat-template smollm2 --chat -", "{}"), "wanted {\"messages\": [..]}");
  expect_error(answer("--chat-template smollm2 --chat -",
                      R"({"messages": [{"role": "assistant", "content": "x"}]})"),
               "nothing is left to answer");
  expect_error(answer("--user hi"), "wanted a chat template");
  expect_error(answer("--user hi --chat-template other"), "chatml, smollm2 or llama3");
  expect_error(answer("--user hi --chat-template llama3"), "has no <|eot_id|>");
  expect_error(answer("--prompt hi --output " + directory_.path("nowhere/answers")),
               "cannot write");
  expect_error(run("--model " + directory_.path("nowhere") + " --prompt hi"), "nowhere");
  fs::remove(path("model/tokenizer.json"));
  expect_error(answer("--prompt hi"), "wanted a tokenizer");
  EXPECT_EQ(answer("--input -", R"({"prompt_ids": [5]})").exit_code, 0);
  write("model/tokenizer.json", R"({"model": {"type": "Unigram"}})");
  expect_error(answer("--prompt hi"), "Unigram");
  EXPECT_EQ(answer("--input -", R"({"prompt_ids": [5]})").exit_code, 0);
}

}  // namespace

}  // namespace bifocal::test
