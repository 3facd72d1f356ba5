// `bifocal generate`: answers of a teacher or a student, with a cache of constant size.
#include <algorithm>
#include <fstream>
#include <optional>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/config_options.h"
#include "cli/session.h"
#include "core/log.h"
#include "data/json_lines.h"
#include "data/word_level_tokenizer.h"
#include "generate/generator.h"

namespace bifocal {

namespace {

namespace fs = std::filesystem;

struct GenerateCommand {
  std::string model;
  std::string tokenizer;
  std::string input;
  std::string output;
  std::vector<std::string> prompts;
  std::int64_t limit = 0;
  std::int64_t batch = 32;
  std::vector<std::int32_t> stop_ids;
  GenerateOptions sampling;
};

struct Prompt {
  nlohmann::json id;
  std::vector<std::int32_t> ids;
};

// The tokenizer beside the model, where there is one that we read. Prompts of ids need none.
std::optional<WordLevelTokenizer> find_tokenizer(const GenerateCommand& command,
                                                 const RunConfig& run) {
  if (!command.tokenizer.empty()) {
    return WordLevelTokenizer::read(command.tokenizer);
  }
  for (const fs::path& directory : {fs::path(command.model), student_directory(run)}) {
    if (directory.empty() || !fs::exists(directory / "tokenizer.json")) {
      continue;
    }
    try {
      return WordLevelTokenizer::read(directory);
    } catch (const Error&) {
      if (!command.prompts.empty()) {
        throw;
      }
    }
  }
  return std::nullopt;
}

std::vector<Prompt> read_prompts(const GenerateCommand& command,
                                 const std::optional<WordLevelTokenizer>& tokenizer) {
  std::vector<Prompt> prompts;
  prompts.reserve(command.prompts.size());
  const auto encode = [&](const std::string& text) {
    BIFOCAL_REQUIRE(
        tokenizer.has_value(),
        "[generate] a prompt of words needs a tokenizer: give --tokenizer, or prompt_ids");
    return tokenizer->encode(text);
  };
  for (const std::string& text : command.prompts) {
    prompts.push_back({nlohmann::json(std::to_string(prompts.size())), encode(text)});
  }
  if (command.input.empty()) {
    return prompts;
  }
  for_each_json_line(command.input, [&](const nlohmann::json& line) {
    if (command.limit > 0 && static_cast<std::int64_t>(prompts.size()) >= command.limit) {
      return;
    }
    BIFOCAL_REQUIRE(line.contains("prompt_ids") || line.contains("prompt"),
                    "[generate] wanted prompt_ids or prompt, got neither");
    prompts.push_back(
        {line.contains("id") ? line.at("id") : nlohmann::json(std::to_string(prompts.size())),
         line.contains("prompt_ids") ? int32_array(line.at("prompt_ids"))
                                     : encode(line.at("prompt").get<std::string>())});
  });
  return prompts;
}

void check_ids(const std::vector<Prompt>& prompts, std::int64_t vocabulary) {
  for (const Prompt& prompt : prompts) {
    for (const std::int32_t id : prompt.ids) {
      BIFOCAL_REQUIRE(id >= 0 && id < vocabulary,
                      "[generate] prompt {}: wanted ids from 0 to {}, got {}",
                      prompt.id.dump(),
                      vocabulary - 1,
                      id);
    }
  }
}

// Where answers go: JSON lines into a file or to standard output.
class AnswerSink {
 public:
  explicit AnswerSink(const std::string& path) {
    if (path.empty()) {
      return;
    }
    file_.open(path, std::ios::trunc);
    BIFOCAL_REQUIRE(file_.good(), "[generate] cannot write {}: check the path of --output", path);
  }

  bool is_file() const { return file_.is_open(); }

  void write(const nlohmann::ordered_json& line) {
    if (!is_file()) {
      fmt::print("{}\n", line.dump());
      return;
    }
    file_ << line.dump() << '\n';
    file_.flush();
    BIFOCAL_REQUIRE(file_.good(), "[generate] writing the answers failed: is the disk full?");
  }

 private:
  std::ofstream file_;
};

nlohmann::ordered_json answer_line(const Prompt& prompt,
                                   const GeneratedAnswer& answer,
                                   const std::optional<WordLevelTokenizer>& tokenizer) {
  nlohmann::ordered_json line{{"id", prompt.id},
                              {"answer_ids", answer.ids},
                              {"prompt_tokens", prompt.ids.size()},
                              {"answer_tokens", answer.ids.size()},
                              {"finish_reason", answer.stopped ? "stop" : "length"}};
  if (tokenizer) {
    line["answer"] = tokenizer->decode(answer.ids);
  }
  return line;
}

// The model's own end-of-sequence ids, unless --stop-id gives others.
std::vector<std::int32_t> stop_ids(const GenerateCommand& command, const ModelConfig& model) {
  if (!command.stop_ids.empty()) {
    return command.stop_ids;
  }
  const nlohmann::json config = nlohmann::json::parse(model.source_json);
  const auto eos = config.find("eos_token_id");
  if (eos == config.end() || eos->is_null()) {
    return {};
  }
  if (eos->is_array()) {
    return eos->get<std::vector<std::int32_t>>();
  }
  return {eos->get<std::int32_t>()};
}

void run_generate(const GenerateCommand& command, const RunConfig& run_config) {
  Session session(run_config);
  const Context context = session.context();
  const std::unique_ptr<Communicator> self = make_self_communicator();
  LoadedModel model =
      open_student(context, run_config, command.model, *self, {Weights::Placement::replicated});
  const std::optional<WordLevelTokenizer> tokenizer = find_tokenizer(command, run_config);
  const std::vector<Prompt> prompts = read_prompts(command, tokenizer);
  BIFOCAL_REQUIRE(!prompts.empty(), "[generate] no prompts: give --prompt or --input");
  check_ids(prompts, model.config().vocabulary);

  AnswerSink sink(command.output);
  const std::int64_t batch = std::min(command.batch, static_cast<std::int64_t>(prompts.size()));
  Generator generator(context, model.decoder(), batch);
  GenerateOptions sampling = command.sampling;
  sampling.stop_ids = stop_ids(command, model.config());
  Console console(sink.is_file());
  const Stopwatch watch;
  std::int64_t tokens = 0;
  const auto total = static_cast<std::int64_t>(prompts.size());
  std::vector<GenerateRequest> requests;
  for (const Prompt& prompt : prompts) {
    requests.push_back({prompt.ids, requests.size()});
  }
  const auto answers = generate(context, generator, requests, sampling);
  for (std::size_t i = 0; i < answers.size(); ++i) {
    sink.write(answer_line(prompts[i], answers[i], tokenizer));
    tokens += static_cast<std::int64_t>(answers[i].ids.size());
  }
  console.end_live();
  console.print(fmt::format(
      "{} answers, {} tokens, {}; cache {} a sequence",
      total,
      format_count(tokens),
      format_tokens_per_second(static_cast<double>(tokens) / watch.seconds()),
      format_bytes(static_cast<double>(generator.cache_bytes()) / static_cast<double>(batch))));
}

}  // namespace

void add_generate_command(CLI::App& app, const CommandContext& context) {
  CLI::App* command = app.add_subcommand(
      "generate",
      "Answer prompts, greedily or sampled, with a cache that does not grow for students");
  const std::shared_ptr<ConfigOptions> config = ConfigOptions::add_to(*command);
  const auto options = std::make_shared<GenerateCommand>();
  command->add_option(
      "--model",
      options->model,
      "A Hugging Face directory (teacher or student), a run directory or a checkpoint; none: "
      "the teacher under student.preset, untrained");
  command->add_option("--tokenizer", options->tokenizer, "tokenizer.json; default: the model's");
  command->add_option("--prompt", options->prompts, "Prompts in words; may be repeated");
  command->add_option("--input", options->input, "JSON lines with prompt_ids or prompt, and id");
  command->add_option("--limit", options->limit, "Read at most so many lines of --input; 0: all")
      ->check(CLI::NonNegativeNumber);
  command->add_option(
      "--output", options->output, "JSON lines of answers; default: standard output");
  command->add_option("--batch", options->batch, "Sequences that advance together")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  GenerateOptions& sampling = options->sampling;
  command->add_option("--max-new-tokens", sampling.max_new_tokens, "Longest answer")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--temperature", sampling.temperature, "0: greedy")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--top-k", sampling.top_k, "Most likely tokens to draw from; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--top-p", sampling.top_p, "Probability that the drawn set reaches")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--seed", sampling.seed, "Of the random streams")->capture_default_str();
  command->add_option(
      "--stop-id", options->stop_ids, "Ids that end an answer; default: the model's");
  command->callback([config, options, &context] {
    require_one_rank(context, "generate");
    run_generate(*options, config->resolve());
  });
}

}  // namespace bifocal
