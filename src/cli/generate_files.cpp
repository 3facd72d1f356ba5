// Tokenizer, chat template and generation_config.json of a model, and what follows from them.
#include <algorithm>

#include "checkpoint/checkpoint.h"
#include "cli/generate_command.h"
#include "config/read.h"
#include "core/file.h"

namespace bifocal {

namespace fs = std::filesystem;

namespace {

// The directories that may hold a model's files, its own first.
std::vector<fs::path> directories_of(const GenerateCommand& command, const RunConfig& run) {
  std::vector<fs::path> directories;
  const auto add = [&](const fs::path& path) {
    if (!path.empty() && fs::is_directory(path)) {
      directories.push_back(path);
    }
  };
  add(command.model);
  add(student_directory(run));
  if (!command.model.empty()) {
    if (const std::optional<fs::path> checkpoint = find_checkpoint(command.model)) {
      const CheckpointInfo info = read_checkpoint_info(*checkpoint);
      add(student_directory(parse_run_config(info.configuration, checkpoint->string())));
    }
  }
  return directories;
}

std::string list_of(const std::vector<fs::path>& directories) {
  std::string list;
  for (const fs::path& directory : directories) {
    list += (list.empty() ? "" : ", ") + directory.string();
  }
  return list.empty() ? "no directory" : list;
}

nlohmann::json read_json_object(const fs::path& path) {
  try {
    nlohmann::json object = nlohmann::json::parse(read_file(path));
    BIFOCAL_REQUIRE(object.is_object(), "[generate] {}: wanted a JSON object", path.string());
    return object;
  } catch (const nlohmann::json::exception& error) {
    fail("[generate] {}: {}", path.string(), error.what());
  }
}

// eos_token_id: an integer, a list of them, null or nothing.
std::optional<std::vector<std::int32_t>> eos_ids(const nlohmann::json& config,
                                                 std::string_view file) {
  const auto eos = config.find("eos_token_id");
  if (eos == config.end() || eos->is_null()) {
    return std::nullopt;
  }
  const nlohmann::json list = eos->is_array() ? *eos : nlohmann::json::array({*eos});
  std::vector<std::int32_t> ids;
  for (const nlohmann::json& id : list) {
    BIFOCAL_REQUIRE(id.is_number_integer(),
                    "[generate] {}: eos_token_id: wanted an id or a list of ids, got {}",
                    file,
                    eos->dump());
    ids.push_back(id.get<std::int32_t>());
  }
  return ids;
}

std::vector<std::int32_t> stop_ids(const GenerateCommand& command,
                                   const ModelFiles& files,
                                   const ModelConfig& model,
                                   bool is_chat) {
  std::vector<std::int32_t> ids = command.stop_ids;
  for (const std::string& token : command.stop_tokens) {
    const std::optional<std::int32_t> id = files.tokenizer().find(token);
    BIFOCAL_REQUIRE(id.has_value(),
                    "[generate] --stop: '{}' is no token of the vocabulary: name a whole token, "
                    "such as <|im_end|>",
                    token);
    ids.push_back(*id);
  }
  if (!ids.empty() || command.ignore_eos) {
    return ids;
  }
  auto own = eos_ids(files.generation_config(), "generation_config.json");
  if (!own) {
    own = eos_ids(nlohmann::json::parse(model.source_json), "config.json");
  }
  ids = own.value_or(std::vector<std::int32_t>{});
  if (is_chat) {
    const auto end = files.tokenizer().find(files.chat_template().end_of_turn());
    if (end && std::ranges::find(ids, *end) == ids.end()) {
      ids.push_back(*end);
    }
  }
  return ids;
}

// A number of generation_config.json; `otherwise` where it says nothing.
template <class T>
T number(const nlohmann::json& config, const char* key, T otherwise) {
  const auto found = config.find(key);
  if (found == config.end() || found->is_null()) {
    return otherwise;
  }
  BIFOCAL_REQUIRE(found->is_number(),
                  "[generate] generation_config.json: {}: wanted a number, got {}",
                  key,
                  found->dump());
  return found->get<T>();
}

}  // namespace

ModelFiles::ModelFiles(const GenerateCommand& command, const RunConfig& run)
    : directories_(directories_of(command, run)) {
  find_tokenizer(command);
  find_chat_template(command);
  if (chat_template_ && tokenizer_ && !tokenizer_->find(chat_template_->end_of_turn())) {
    no_chat_template_ = fmt::format(
        "[generate] the tokenizer has no {}, which ends the turns of {}: give another "
        "--chat-template",
        chat_template_->end_of_turn(),
        chat_template_->name());
    chat_template_.reset();
  }
  for (const fs::path& directory : directories_) {
    if (fs::exists(directory / "generation_config.json")) {
      generation_config_ = read_json_object(directory / "generation_config.json");
      break;
    }
  }
}

// One that cannot be read is an error only where it is needed: prompts of ids need none.
void ModelFiles::find_tokenizer(const GenerateCommand& command) {
  if (!command.tokenizer.empty()) {
    tokenizer_ = read_tokenizer(command.tokenizer);
    return;
  }
  no_tokenizer_ = fmt::format(
      "[generate] wanted a tokenizer, found no tokenizer.json in {}: give --tokenizer, or "
      "prompt_ids",
      list_of(directories_));
  for (const fs::path& directory : directories_) {
    if (fs::exists(directory / "tokenizer.json")) {
      try {
        tokenizer_ = read_tokenizer(directory);
      } catch (const Error& error) {
        no_tokenizer_ = error.what();
      }
      return;
    }
  }
}

void ModelFiles::find_chat_template(const GenerateCommand& command) {
  if (!command.chat_template.empty()) {
    chat_template_ = ChatTemplate::named(command.chat_template);
    return;
  }
  no_chat_template_ =
      fmt::format("[generate] wanted a chat template, found none in {}: give --chat-template",
                  list_of(directories_));
  for (const fs::path& directory : directories_) {
    if (fs::exists(directory / "tokenizer_config.json") ||
        fs::exists(directory / "chat_template.jinja")) {
      try {
        chat_template_ = ChatTemplate::of_directory(directory);
      } catch (const Error& error) {
        no_chat_template_ = fmt::format("{} (--chat-template)", error.what());
      }
      return;
    }
  }
}

const Tokenizer& ModelFiles::tokenizer() const {
  BIFOCAL_REQUIRE(tokenizer_ != nullptr, "{}", no_tokenizer_);
  return *tokenizer_;
}

const ChatTemplate& ModelFiles::chat_template() const {
  BIFOCAL_REQUIRE(chat_template_.has_value(), "{}", no_chat_template_);
  return *chat_template_;
}

GenerateOptions generate_options(const GenerateCommand& command,
                                 const ModelFiles& files,
                                 const ModelConfig& model,
                                 bool is_chat) {
  GenerateOptions options{.max_new_tokens = command.max_new_tokens,
                          .seed = command.seed,
                          .prefill_chunk = command.prefill_chunk};
  if (command.sample) {
    const nlohmann::json& config = files.generation_config();
    options.temperature = number(config, "temperature", 1.0);
    options.top_k = number(config, "top_k", std::int64_t{0});
    options.top_p = number(config, "top_p", 1.0);
  }
  options.temperature = command.temperature.value_or(options.temperature);
  options.top_k = command.top_k.value_or(options.top_k);
  options.top_p = command.top_p.value_or(options.top_p);
  BIFOCAL_REQUIRE(options.temperature > 0.0 || (!command.top_k && !command.top_p),
                  "[generate] --top-k and --top-p choose among draws, but a temperature of 0 draws "
                  "nothing: give --temperature or --sample");
  BIFOCAL_REQUIRE(options.temperature > 0.0 || command.samples == 1,
                  "[generate] {} samples without a temperature would all be the same: give "
                  "--temperature or --sample",
                  command.samples);
  options.stop_ids = stop_ids(command, files, model, is_chat);
  return options;
}

std::string text_of(const GeneratedAnswer& answer, const Tokenizer& tokenizer) {
  const std::span<const std::int32_t> ids(answer.ids);
  return tokenizer.decode(answer.stopped ? ids.first(ids.size() - 1) : ids, true);
}

LengthWarning::LengthWarning(const ModelConfig& model, Console& console) : console_(&console) {
  const bool has_full = std::ranges::any_of(model.mixers, &MixerSettings::is_full);
  longest_ = has_full ? model.max_position : 0;
}

void LengthWarning::see(std::int64_t tokens) {
  if (longest_ > 0 && tokens > longest_) {
    console_->print(fmt::format(
        "bifocal: warning: [generate] {} tokens, more than the {} that this model's full "
        "attention was trained on: what it says from here on may make no sense",
        format_count(tokens),
        format_count(longest_)));
    longest_ = 0;
  }
}

}  // namespace bifocal
