// A conversation at the terminal. The model's state goes on from turn to turn: only what is new is
// read, and what the model said is what it drew, not its text encoded again.
#include <iostream>
#include <unistd.h>

#include "cli/generate_command.h"

namespace bifocal {

namespace {

class Conversation {
 public:
  Conversation(const GenerateCommand& command,
               const ModelFiles& files,
               Context context,
               LoadedModel& model)
      : command_(command),
        tokenizer_(files.tokenizer()),
        chat_(files.chat_template()),
        context_(context),
        generator_(context, model.decoder(), 1),
        options_(generate_options(command, files, model.config(), true)),
        console_(true, stderr),
        warning_(model.config(), console_) {
    end_of_turn_ = tokenizer_.find(chat_.end_of_turn()).value();
    forget();
  }

  void forget() {
    generator_.reset(0);
    messages_.clear();
    pending_.clear();
    if (!command_.system.empty()) {
      messages_.push_back({"system", command_.system});
    }
  }

  void answer(const std::string& text) {
    messages_.push_back({"user", text});
    GenerateRequest request{.prompt = new_ids(), .stream = turn_++};
    warning_.see(generator_.tokens(0) + static_cast<std::int64_t>(request.prompt.size()));
    TextStream words(tokenizer_, true);
    const Stopwatch watch;
    std::int64_t told = 0;
    const GeneratedAnswer answer =
        continue_sequence(context_, generator_, request, options_, [&](std::int32_t id) {
          warning_.see(generator_.tokens(0) + 1);
          ++told;
          if (std::ranges::find(options_.stop_ids, id) == options_.stop_ids.end()) {
            std::cout << words.append(id) << std::flush;
          }
        });
    std::cout << words.finish() << std::endl;
    console_.live(
        fmt::format("{} tokens, {}",
                    told,
                    format_tokens_per_second(static_cast<double>(told) / watch.seconds())));
    console_.end_live();
    messages_.push_back({"assistant", text_of(answer, tokenizer_)});
    // The last token has not been read yet. One that ended the answer gives way to the end of turn.
    pending_.clear();
    if (!answer.stopped) {
      pending_.push_back(answer.ids.back());
    }
    pending_.push_back(end_of_turn_);
  }

 private:
  // What the conversation has more than the model has read.
  std::vector<std::int32_t> new_ids() {
    if (pending_.empty()) {
      return encode_chat(chat_, tokenizer_, messages_, true).ids;
    }
    const ChatText whole = chat_.render(messages_, true);
    const auto read = static_cast<std::size_t>(whole.assistant.back().second);
    std::vector<std::int32_t> ids = pending_;
    const std::vector<std::int32_t> rest =
        tokenizer_.encode(std::string_view(whole.text).substr(read));
    ids.insert(ids.end(), rest.begin(), rest.end());
    return ids;
  }

  const GenerateCommand& command_;
  const Tokenizer& tokenizer_;
  const ChatTemplate& chat_;
  Context context_;
  Generator generator_;
  GenerateOptions options_;
  Console console_;
  LengthWarning warning_;
  std::int32_t end_of_turn_ = 0;
  std::vector<Message> messages_;
  std::vector<std::int32_t> pending_;  // said and not yet read; empty: nothing was said
  std::uint64_t turn_ = 0;
};

}  // namespace

void run_interactive(const GenerateCommand& command,
                     const ModelFiles& files,
                     Context context,
                     LoadedModel& model) {
  BIFOCAL_REQUIRE(command.prompts.empty() && command.users.empty() && command.input.empty() &&
                      command.chat.empty() && command.output.empty() && command.samples == 1 &&
                      !command.text && command.limit == 0,
                  "[generate] --interactive reads turns from standard input and answers there: "
                  "leave out other prompts, --output, --text, --limit and --samples");
  Conversation conversation(command, files, context, model);
  const bool is_terminal = isatty(STDIN_FILENO) != 0;
  if (is_terminal) {
    std::cout << "/reset forgets the conversation, /quit ends\n";
  }
  std::string line;
  while (true) {
    if (is_terminal) {
      std::cout << "> " << std::flush;
    }
    if (!std::getline(std::cin, line) || line == "/quit") {
      return;
    }
    if (line == "/reset") {
      conversation.forget();
    } else if (line.find_first_not_of(" \t\r") != std::string::npos) {
      conversation.answer(line);
    }
  }
}

}  // namespace bifocal
