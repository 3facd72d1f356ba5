// What `bifocal generate` was told, and the parts that its files share.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/session.h"
#include "core/log.h"
#include "data/chat_template.h"
#include "data/tokenizer.h"
#include "generate/generator.h"

namespace CLI {
class App;
}

namespace bifocal {

struct GenerateCommand {
  // The model and its words.
  std::string model;
  std::string tokenizer;
  std::string chat_template;
  // Prompts.
  std::vector<std::string> prompts;
  std::vector<std::string> users;
  std::string system;
  std::string input;
  std::string chat;
  bool interactive = false;
  std::int64_t limit = 0;
  std::int64_t samples = 1;
  // Answers.
  std::int64_t batch = 32;
  std::string output;
  bool text = false;
  // Sampling and ends.
  std::optional<double> temperature;
  std::optional<std::int64_t> top_k;
  std::optional<double> top_p;
  bool sample = false;
  std::uint64_t seed = 0;
  std::int64_t max_new_tokens = 256;
  std::int64_t prefill_chunk = 0;  // 0: by the device, see resolve_prefill_chunk()
  std::vector<std::int32_t> stop_ids;
  std::vector<std::string> stop_tokens;
  bool ignore_eos = false;
};

// Registers --model, --tokenizer, --chat-template, --batch and --prefill-chunk; and
// --max-new-tokens, the sampling, the seed and what ends an answer.
void add_model_options(CLI::App& app, GenerateCommand& command);
void add_sampling_options(CLI::App& app, GenerateCommand& command);

// Files that stand beside a model: in its own directory or, for a checkpoint, in the one that its
// student was made from.
class ModelFiles {
 public:
  ModelFiles(const GenerateCommand& command, const RunConfig& run);

  // Throws Error that says what was looked for where nothing is found or readable.
  const Tokenizer& tokenizer() const;
  const ChatTemplate& chat_template() const;

  bool has_tokenizer() const { return tokenizer_ != nullptr; }

  bool has_chat_template() const { return chat_template_.has_value(); }

  // generation_config.json; an empty object where there is none.
  const nlohmann::json& generation_config() const { return generation_config_; }

 private:
  void find_tokenizer(const GenerateCommand& command);
  void find_chat_template(const GenerateCommand& command);

  std::vector<std::filesystem::path> directories_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::optional<ChatTemplate> chat_template_;
  nlohmann::json generation_config_ = nlohmann::json::object();
  std::string no_tokenizer_, no_chat_template_;  // why
};

// Tokens of a prompt that the device reads well at once, where the command names none.
void resolve_prefill_chunk(GenerateCommand& command, const RunConfig& config);

// Sampling as the command line and, with --sample, generation_config.json want it, and the ids that
// end an answer: those named, or the model's own. is_chat adds the chat template's end of turn.
GenerateOptions generate_options(const GenerateCommand& command,
                                 const ModelFiles& files,
                                 const ModelConfig& model,
                                 bool is_chat);

struct Prompt {
  nlohmann::json id;
  std::vector<std::int32_t> ids;
  bool is_chat = false;
};

// --prompt, --user, --input and --chat, in this order. Throws Error for files that cannot be read
// or hold something else, for empty prompts and for ids outside the vocabulary, with the prompt's
// id.
std::vector<Prompt> read_prompts(const GenerateCommand& command,
                                 const ModelFiles& files,
                                 std::int64_t vocabulary);

// The text of an answer without the token that ended it and without special tokens.
std::string text_of(const GeneratedAnswer& answer, const Tokenizer& tokenizer);

// Says once, on `console`, that a model with full attention is past what it was trained on.
class LengthWarning {
 public:
  LengthWarning(const ModelConfig& model, Console& console);

  void see(std::int64_t tokens);

 private:
  std::int64_t longest_;  // 0: no bound
  Console* console_;
};

// The terminal's user and the model in turns, until the input ends or says /quit.
void run_interactive(const GenerateCommand& command,
                     const ModelFiles& files,
                     Context context,
                     LoadedModel& model);

}  // namespace bifocal
