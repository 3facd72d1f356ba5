// `bifocal tokenize`: documents of text files into token shards.
#include "data/tokenize.h"

#include <array>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <memory>
#include <utility>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "core/file.h"
#include "core/log.h"

namespace bifocal {

namespace {

struct TokenizeCommand {
  TokenizeOptions options;
  std::string json;
};

// While it lives, a signal that asks the program to end is noted; a second one ends it. Signals
// that were ignored (nohup) stay ignored.
class StopOnSignals {
 public:
  StopOnSignals() {
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      struct sigaction action {};

      action.sa_handler = [](int /*signal*/) { is_asked = true; };
      action.sa_flags = SA_RESETHAND | SA_RESTART;
      ::sigaction(kSignals[i], nullptr, &before_[i]);
      if (before_[i].sa_handler != SIG_IGN) {
        ::sigaction(kSignals[i], &action, nullptr);
      }
    }
  }

  ~StopOnSignals() {
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      ::sigaction(kSignals[i], &before_[i], nullptr);
    }
  }

  StopOnSignals(const StopOnSignals&) = delete;
  StopOnSignals& operator=(const StopOnSignals&) = delete;
  StopOnSignals(StopOnSignals&&) = delete;
  StopOnSignals& operator=(StopOnSignals&&) = delete;

  static inline std::atomic<bool> is_asked = false;

 private:
  static constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP};
  std::array<struct sigaction, kSignals.size()> before_{};
};

// One live line on a terminal, a line now and then elsewhere.
class ProgressLine {
 public:
  void show(const TokenizeProgress& progress) {
    constexpr double kLiveSeconds = 0.2;
    constexpr double kPlainSeconds = 30.0;
    if (last_.seconds() >= (console_.is_terminal() ? kLiveSeconds : kPlainSeconds)) {
      last_.restart();
      console_.live(line(progress));
      console_.plain(line(progress));
    }
    latest_ = progress;
  }

  // The line of the whole run.
  void finish() {
    console_.live("");
    console_.print(fmt::format("{} documents, {} tokens of {:.1f} MB of text in {}: {:.2f} MB/s",
                               format_count(latest_.documents),
                               format_count(latest_.tokens),
                               megabytes(latest_.text_bytes),
                               format_duration(start_.seconds()),
                               megabytes(latest_.text_bytes) / start_.seconds()));
  }

 private:
  static double megabytes(std::int64_t bytes) { return static_cast<double>(bytes) / 1e6; }

  std::string line(const TokenizeProgress& progress) const {
    const double seconds = start_.seconds();
    const double share =
        static_cast<double>(progress.bytes) / static_cast<double>(progress.all_bytes);
    return fmt::format(
        "{}/{} files | {:.1f}/{:.1f} MB read | {} documents | {} tokens | {:.2f} MB/s of text | "
        "{} left",
        progress.files,
        progress.all_files,
        megabytes(progress.bytes),
        megabytes(progress.all_bytes),
        format_count(progress.documents),
        format_count(progress.tokens),
        megabytes(progress.text_bytes) / seconds,
        format_duration(seconds / share - seconds));
  }

  Console console_{true, stderr};
  Stopwatch start_;
  Stopwatch last_;
  TokenizeProgress latest_;
};

void run(TokenizeCommand& command) {
  ProgressLine progress;
  const StopOnSignals signals;
  command.options.on_progress = [&](const TokenizeProgress& now) { progress.show(now); };
  command.options.should_stop = [] { return StopOnSignals::is_asked.load(); };
  const TokenizeReport report = tokenize(command.options);
  progress.finish();
  fmt::print("{}", to_text(report));
  if (!command.json.empty()) {
    write_file_atomically(command.json, to_json(report).dump(2) + "\n");
  }
}

void add_text_options(CLI::App& command, TokenizeOptions& options) {
  command.add_option("--tokenizer",
                     options.tokenizer,
                     "tokenizer.json, or a directory with one; needed by text and messages");
  command.add_option("--chat-template",
                     options.chat_template,
                     "How messages are written: chatml, smollm2 or llama3; default: as the "
                     "tokenizer's directory says, where it is one of them");
  command
      .add_option("--form",
                  options.form,
                  "Which of several documents in one line counts: messages, completion, text, ids "
                  "or answer_ids")
      ->capture_default_str();
  command.add_option("--end-token",
                     options.end_token,
                     "Token put after each text and completion, such as \"<|endoftext|>\"; none by "
                     "default");
  command
      .add_option("--vocabulary",
                  options.vocabulary,
                  "Ids are below it; needed without --tokenizer, default: the tokenizer's size")
      ->check(CLI::PositiveNumber);
}

}  // namespace

void add_tokenize_command(CLI::App& app, const CommandContext& context) {
  CLI::App* command = app.add_subcommand("tokenize", "Make token shards of JSON-lines documents");
  auto state = std::make_shared<TokenizeCommand>();
  TokenizeOptions& options = state->options;
  command
      ->add_option("inputs",
                   options.inputs,
                   "Files, directories (every *.jsonl, *.ndjson, *.jsonlines, *.json-lines below) "
                   "and quoted patterns (\"data/*.jsonl.zst\"); plain, gzip or zstd; a line has "
                   "messages, prompt and completion, text, ids (and keep), or prompt_ids and "
                   "answer_ids")
      ->required();
  command->add_option("--output", options.output, "Directory to make")->required();
  add_text_options(*command, options);
  command->add_option("--held-out", options.held_out, "Share of documents set aside, by their hash")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--shard-tokens", options.shard_tokens, "Most tokens of a shard")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command
      ->add_option("--max-tokens",
                   options.max_tokens,
                   "Leave longer documents out; default: none, rows are cut when they are packed")
      ->check(CLI::PositiveNumber);
  command->add_option("--threads", options.threads, "Threads that tokenize; default: all cores")
      ->check(CLI::PositiveNumber);
  command->add_option("--json", state->json, "Write the report here too");
  command->callback([state, &context] {
    require_one_rank(context, "tokenize");
    run(*state);
  });
}

}  // namespace bifocal
