// `bifocal generate`: answers of a teacher or a student, with a cache of constant size.
#include <algorithm>
#include <fstream>
#include <iostream>
#include <unistd.h>

#include <CLI/CLI.hpp>

#include "cli/commands.h"
#include "cli/config_options.h"
#include "cli/generate_command.h"
#include "core/process.h"

namespace bifocal {

namespace {

constexpr std::int64_t kMemoryTokens = 1000;  // after so many the process should have its size

// Where answers go: JSON lines into a file or to standard output.
class AnswerSink {
 public:
  // Empties the file: to be called when nothing can be refused any more.
  void open(const std::string& path) {
    if (path.empty()) {
      return;
    }
    file_.open(path, std::ios::trunc);
    BIFOCAL_REQUIRE(file_.good(), "[generate] cannot write {}: check the path of --output", path);
  }

  void write(const nlohmann::ordered_json& line) {
    std::ostream& out = file_.is_open() ? file_ : std::cout;
    out << line.dump() << '\n' << std::flush;
    BIFOCAL_REQUIRE(out.good(), "[generate] writing the answers failed: is the disk full?");
  }

 private:
  std::ofstream file_;
};

// Requests on their way, and what is told about them.
class Answers {
 public:
  Answers(const GenerateCommand& command, const ModelFiles& files, std::vector<Prompt> prompts)
      : command_(command), files_(files), prompts_(std::move(prompts)), console_(true, stderr) {
    for (std::size_t i = 0; i < prompts_.size(); ++i) {
      for (std::int64_t sample = 0; sample < command.samples; ++sample) {
        requests_.push_back({prompts_[i].ids, requests_.size()});
      }
    }
    is_text_ = command.text || (requests_.size() == 1 && command.output.empty() &&
                                files.has_tokenizer() && isatty(STDOUT_FILENO) != 0);
    BIFOCAL_REQUIRE(!is_text_ || (requests_.size() == 1 && command.output.empty()),
                    "[generate] --text shows one answer, got {} and {}: leave it out for JSON "
                    "lines",
                    requests_.size(),
                    command.output.empty() ? "no --output" : "an --output");
    if (is_text_) {
      words_.emplace(files.tokenizer(), true);
    }
    records_.resize(requests_.size());
  }

  void run(Context context, LoadedModel& model) {
    const bool is_chat = std::ranges::any_of(prompts_, &Prompt::is_chat);
    options_ = generate_options(command_, files_, model.config(), is_chat);
    const std::int64_t batch =
        std::min(command_.batch, static_cast<std::int64_t>(requests_.size()));
    LengthWarning warning(model.config(), console_);
    for (const Prompt& prompt : prompts_) {
      warning.see(static_cast<std::int64_t>(prompt.ids.size()));
    }
    Generator generator(context, model.decoder(), batch);
    sink_.open(command_.output);
    watch_.restart();
    generate(context,
             generator,
             requests_,
             options_,
             {.on_token =
                  [&](std::int64_t request, std::int32_t id) {
                    take(request, id, generator);
                    warning.see(prompt_tokens(request) + of(request).tokens);
                  },
              .on_finish = [&](std::int64_t request,
                               const GeneratedAnswer& answer) { finish(request, answer); },
              .on_begin = [&](std::int64_t request) { of(request).begin = watch_.seconds(); }});
    summarise(generator);
  }

 private:
  struct Record {
    double begin = 0.0, first = 0.0, end = 0.0;  // seconds
    std::int64_t tokens = 0;
    std::optional<GeneratedAnswer> answer;  // until it is written
  };

  Record& of(std::int64_t request) { return records_[static_cast<std::size_t>(request)]; }

  const Prompt& prompt_of(std::int64_t request) const {
    return prompts_[static_cast<std::size_t>(request / command_.samples)];
  }

  std::int64_t prompt_tokens(std::int64_t request) const {
    return static_cast<std::int64_t>(prompt_of(request).ids.size());
  }

  void take(std::int64_t request, std::int32_t id, const Generator& generator) {
    Record& record = of(request);
    if (record.tokens++ == 0) {
      record.first = watch_.seconds();
      prompt_seconds_ += record.first - record.begin;
      prompt_tokens_ += prompt_tokens(request);
    }
    if (++tokens_ == kMemoryTokens) {
      early_bytes_ = resident_bytes();
      early_cache_ = generator.cache_bytes();
    }
    const bool ends = std::ranges::find(options_.stop_ids, id) != options_.stop_ids.end();
    if (is_text_ && !ends) {
      std::cout << words_->append(id) << std::flush;
    }
  }

  // Answers are written in the order of their requests.
  void finish(std::int64_t request, const GeneratedAnswer& answer) {
    console_.live("");  // answers may go to the same terminal
    of(request).end = watch_.seconds();
    of(request).answer = answer;
    ++finished_;
    for (; written_ < records_.size() && records_[written_].answer; ++written_) {
      if (!is_text_) {
        sink_.write(line_of(static_cast<std::int64_t>(written_)));
      }
      records_[written_].answer.reset();
    }
    if (is_text_) {
      std::cout << words_->finish() << std::endl;
      return;
    }
    console_.live(fmt::format("{}/{} answers  {}", finished_, requests_.size(), answer_rate()));
  }

  nlohmann::ordered_json line_of(std::int64_t request) {
    const Record& record = of(request);
    const GeneratedAnswer& answer = *record.answer;
    nlohmann::ordered_json line{{"id", prompt_of(request).id}};
    if (command_.samples > 1) {
      line["sample"] = request % command_.samples;
    }
    if (files_.has_tokenizer()) {
      line["answer"] = text_of(answer, files_.tokenizer());
    }
    line["answer_ids"] = answer.ids;
    line["prompt_tokens"] = prompt_tokens(request);
    line["answer_tokens"] = answer.ids.size();
    line["finish_reason"] = answer.stopped ? "stop" : "length";
    line["seconds"] = record.end - record.begin;
    line["tokens_per_second"] =
        static_cast<double>(answer.ids.size()) / std::max(1e-9, record.end - record.begin);
    return line;
  }

  // Over the time that no prompt was being read.
  std::string answer_rate() const {
    return format_tokens_per_second(static_cast<double>(tokens_) /
                                    (watch_.seconds() - prompt_seconds_));
  }

  void summarise(const Generator& generator) {
    console_.end_live();
    console_.print(fmt::format(
        "{}, {} tokens, {}; prompts {} tokens, {}",
        records_.size() == 1 ? "1 answer" : fmt::format("{} answers", records_.size()),
        format_count(tokens_),
        answer_rate(),
        format_count(prompt_tokens_),
        format_tokens_per_second(static_cast<double>(prompt_tokens_) / prompt_seconds_)));
    const auto sizes = [](std::size_t cache, std::size_t process) {
      return fmt::format("cache {}, process {}",
                         format_bytes(static_cast<double>(cache)),
                         format_bytes(static_cast<double>(process)));
    };
    if (tokens_ > kMemoryTokens) {
      console_.print(fmt::format(
          "after {} tokens: {}", format_count(kMemoryTokens), sizes(early_cache_, early_bytes_)));
    }
    console_.print("at the end: " + sizes(generator.cache_bytes(), resident_bytes()));
  }

  const GenerateCommand& command_;
  const ModelFiles& files_;
  std::vector<Prompt> prompts_;
  std::vector<GenerateRequest> requests_;  // --samples of each prompt, neighbours
  GenerateOptions options_;
  AnswerSink sink_;
  Console console_;
  bool is_text_ = false;
  std::optional<TextStream> words_;
  std::vector<Record> records_;
  std::size_t written_ = 0, finished_ = 0;
  Stopwatch watch_;
  std::int64_t tokens_ = 0, prompt_tokens_ = 0;
  double prompt_seconds_ = 0.0;
  std::size_t early_bytes_ = 0, early_cache_ = 0;
};

void run_generate(GenerateCommand command, const RunConfig& run_config) {
  resolve_prefill_chunk(command, run_config);
  Session session(run_config, make_self_communicator());
  const std::unique_ptr<Communicator> self = session.take_world();
  // In parts over one rank: weights then keep the type they are stored in.
  const ModelPlacement placement{Weights::Placement::sharded, Region::weights, true};
  LoadedModel model = open_student(session.context(), run_config, command.model, *self, placement);
  const ModelFiles files(command, run_config);
  if (command.interactive) {
    run_interactive(command, files, session.context(), model);
    return;
  }
  Answers answers(command, files, read_prompts(command, files, model.config().vocabulary));
  answers.run(session.context(), model);
}

void add_prompt_options(CLI::App& app, GenerateCommand& command) {
  app.add_option("--prompt", command.prompts, "Text to continue; may be repeated");
  app.add_option("--user", command.users, "A user's turn to answer; may be repeated");
  app.add_option("--system",
                 command.system,
                 "System message of chats that have none: --user, messages and --interactive");
  app.add_option("--input",
                 command.input,
                 "JSON lines with prompt, messages or prompt_ids, and id; -: standard input");
  app.add_option("--chat",
                 command.chat,
                 "JSON lines of {\"messages\": [..]}, or one array of messages; -: standard input");
  app.add_flag("--interactive",
               command.interactive,
               "Chat at the terminal; the state goes on from turn to turn");
  app.add_option("--limit", command.limit, "Most lines of --input and of --chat; 0: all")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--samples", command.samples, "Answers to each prompt")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
}

}  // namespace

void add_generate_command(CLI::App& app, const CommandContext& context) {
  CLI::App* added = app.add_subcommand(
      "generate",
      "Answer prompts or chat, greedily or sampled, with a cache that does not grow for students");
  const std::shared_ptr<ConfigOptions> config = ConfigOptions::add_to(*added);
  const auto command = std::make_shared<GenerateCommand>();
  add_model_options(*added, *command);
  add_prompt_options(*added, *command);
  added->add_option("--output", command->output, "JSON lines of answers; default: standard output");
  added->add_flag("--text",
                  command->text,
                  "Print the one answer as it is written; default for one prompt on a terminal");
  add_sampling_options(*added, *command);
  added->callback([config, command, &context] {
    require_one_rank(context, "generate");
    run_generate(*command, config->resolve());
  });
}

}  // namespace bifocal
