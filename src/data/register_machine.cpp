// Vocabulary, generator, solver and checker of register-machine problems.
#include "data/register_machine.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include <fmt/format.h>

#include "core/error.h"
#include "core/random.h"

namespace bifocal {

namespace {

constexpr std::int64_t kVocabularyMultiple = 64;

// What a prompt says.
struct Program {
  struct Command {
    std::int32_t op = 0;  // add or set
    std::int64_t target = 0;
    std::int64_t value = 0;
  };

  std::vector<std::int64_t> start;  // [registers]
  std::vector<Command> commands;    // [steps]
};

void append_command(std::vector<std::int32_t>& ids,
                    const RegisterVocabulary& vocabulary,
                    const Program& program,
                    std::size_t step) {
  const Program::Command& command = program.commands[step];
  ids.insert(ids.end(),
             {vocabulary.index(static_cast<std::int64_t>(step) + 1),
              command.op,
              vocabulary.reg(command.target),
              vocabulary.digit(command.value)});
}

std::vector<std::int32_t> make_prompt(const RegisterVocabulary& vocabulary,
                                      const Program& program) {
  std::vector<std::int32_t> ids = {vocabulary.problem()};
  ids.reserve(3 + 2 * program.start.size() + 4 * program.commands.size());
  for (std::size_t k = 0; k < program.start.size(); ++k) {
    ids.push_back(vocabulary.reg(static_cast<std::int64_t>(k)));
    ids.push_back(vocabulary.digit(program.start[k]));
  }
  ids.push_back(vocabulary.program());
  for (std::size_t n = 0; n < program.commands.size(); ++n) {
    append_command(ids, vocabulary, program, n);
  }
  ids.push_back(vocabulary.answer());
  return ids;
}

std::vector<std::int32_t> make_answer(const RegisterVocabulary& vocabulary,
                                      const Program& program) {
  std::vector<std::int64_t> registers = program.start;
  std::vector<std::int32_t> ids;
  ids.reserve(program.commands.size() * (7 + registers.size()) + 2);
  for (std::size_t n = 0; n < program.commands.size(); ++n) {
    const Program::Command& command = program.commands[n];
    std::int64_t& target = registers[static_cast<std::size_t>(command.target)];
    target = command.op == vocabulary.add() ? (target + command.value) % 10 : command.value;
    ids.push_back(vocabulary.step());
    append_command(ids, vocabulary, program, n);
    ids.push_back(vocabulary.colon());
    for (const std::int64_t value : registers) {
      ids.push_back(vocabulary.digit(value));
    }
    ids.push_back(vocabulary.semicolon());
  }
  ids.push_back(vocabulary.end());
  ids.push_back(vocabulary.end_of_text());
  return ids;
}

// Reads a prompt token by token; every mismatch names the token.
class PromptReader {
 public:
  PromptReader(const RegisterVocabulary& vocabulary, std::span<const std::int32_t> ids)
      : vocabulary_(vocabulary), ids_(ids) {}

  Program read() {
    Program program;
    expect(vocabulary_.problem());
    for (std::int64_t k = 0; k < vocabulary_.registers(); ++k) {
      expect(vocabulary_.reg(k));
      program.start.push_back(number(vocabulary_.digit(0), 10, "a digit"));
    }
    expect(vocabulary_.program());
    while (place_ < ids_.size() && ids_[place_] != vocabulary_.answer()) {
      const auto step = static_cast<std::int64_t>(program.commands.size()) + 1;
      BIFOCAL_REQUIRE(step <= vocabulary_.max_steps(),
                      "[register_machine] the prompt has more than {} steps: raise the largest "
                      "number of steps",
                      vocabulary_.max_steps());
      expect(vocabulary_.index(step));
      Program::Command command;
      command.op = vocabulary_.add() + number(vocabulary_.add(), 2, "add or set");
      command.target = number(vocabulary_.reg(0), vocabulary_.registers(), "a register");
      command.value = number(vocabulary_.digit(0), 10, "a digit");
      program.commands.push_back(command);
    }
    expect(vocabulary_.answer());
    BIFOCAL_REQUIRE(place_ == ids_.size() && !program.commands.empty(),
                    "[register_machine] a prompt has at least one step and ends with \"answer\": "
                    "this one has {} steps and {} tokens after it",
                    program.commands.size(),
                    ids_.size() - place_);
    return program;
  }

 private:
  void expect(std::int32_t id) { number(id, 1, vocabulary_.word(id)); }

  // The next token's distance from `first`, which must be below `count`.
  std::int32_t number(std::int32_t first, std::int64_t count, std::string_view wanted) {
    BIFOCAL_REQUIRE(place_ < ids_.size(),
                    "[register_machine] the prompt ends after {} tokens where {} should come",
                    ids_.size(),
                    wanted);
    const std::int32_t id = ids_[place_];
    BIFOCAL_REQUIRE(id >= first && id < first + count,
                    "[register_machine] prompt token {} should be {}, got {}: is the number of "
                    "registers or steps another one?",
                    place_,
                    wanted,
                    vocabulary_.word(id));
    ++place_;
    return id - first;
  }

  const RegisterVocabulary& vocabulary_;
  std::span<const std::int32_t> ids_;
  std::size_t place_ = 0;
};

}  // namespace

RegisterVocabulary::RegisterVocabulary(std::int64_t registers, std::int64_t max_steps)
    : registers_(registers), max_steps_(max_steps) {
  BIFOCAL_REQUIRE(registers >= 1 && registers <= 10000,
                  "[register_machine] registers must be from 1 to 10000, got {}",
                  registers);
  BIFOCAL_REQUIRE(max_steps >= 1 && max_steps <= 1000000,
                  "[register_machine] the largest number of steps must be from 1 to 1000000, got "
                  "{}",
                  max_steps);
  for (int value = 0; value < 10; ++value) {
    words_.push_back(std::to_string(value));
  }
  for (std::int64_t k = 0; k < registers; ++k) {
    words_.push_back(fmt::format("r{}", k));
  }
  for (std::int64_t n = 0; n <= max_steps; ++n) {
    words_.push_back(fmt::format("#{}", n));
  }
  for (const char* word : {"<problem>",
                           "program",
                           "answer",
                           "step",
                           "add",
                           "set",
                           ":",
                           ";",
                           "end",
                           "<end>",
                           "<pad>"}) {
    words_.emplace_back(word);
  }
  for (int unused = 0; size() % kVocabularyMultiple != 0; ++unused) {
    words_.push_back(fmt::format("<unused{}>", unused));
  }
  for (std::size_t id = 0; id < words_.size(); ++id) {
    ids_.emplace(words_[id], static_cast<std::int32_t>(id));
  }
}

std::string RegisterVocabulary::word(std::int32_t id) const {
  return id >= 0 && id < size() ? words_[static_cast<std::size_t>(id)] : fmt::format("id {}", id);
}

std::string RegisterVocabulary::decode(std::span<const std::int32_t> ids) const {
  std::string text;
  for (const std::int32_t id : ids) {
    text += text.empty() ? "" : " ";
    text += word(id);
  }
  return text;
}

std::vector<std::int32_t> RegisterVocabulary::encode(std::string_view text) const {
  std::istringstream stream{std::string(text)};
  std::vector<std::int32_t> ids;
  for (std::string word; stream >> word;) {
    const auto found = ids_.find(word);
    BIFOCAL_REQUIRE(
        found != ids_.end(), "[register_machine] the vocabulary has no word \"{}\"", word);
    ids.push_back(found->second);
  }
  return ids;
}

std::string RegisterVocabulary::tokenizer_json() const {
  std::string vocabulary;
  for (std::size_t id = 0; id < words_.size(); ++id) {
    vocabulary += fmt::format("{}\"{}\": {}", id == 0 ? "" : ", ", words_[id], id);
  }
  return R"({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], )"
         R"("normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"}, )"
         R"("post_processor": null, "decoder": null, "model": {"type": "WordLevel", "vocab": {)" +
         vocabulary + R"(}, "unk_token": "<pad>"}})";
}

RegisterProblem make_problem(const RegisterVocabulary& vocabulary,
                             std::uint64_t seed,
                             std::int64_t number,
                             std::int64_t steps) {
  BIFOCAL_REQUIRE(steps >= 1 && steps <= vocabulary.max_steps(),
                  "[register_machine] steps must be from 1 to {}, got {}: raise the largest number "
                  "of steps (--max-steps)",
                  vocabulary.max_steps(),
                  steps);
  const std::uint64_t stream =
      random_bits(seed, stream_of("register_machine.problem"), static_cast<std::uint64_t>(number));
  std::uint64_t drawn = 0;
  const auto below = [&](std::int64_t bound) {
    return static_cast<std::int64_t>(
        random_below(static_cast<std::uint64_t>(bound), seed, stream, drawn++));
  };
  Program program;
  for (std::int64_t k = 0; k < vocabulary.registers(); ++k) {
    program.start.push_back(below(10));
  }
  for (std::int64_t n = 0; n < steps; ++n) {
    Program::Command command;
    command.op = below(2) == 1 ? vocabulary.add() : vocabulary.set();
    command.target = below(vocabulary.registers());
    command.value = below(10);
    program.commands.push_back(command);
  }
  return {fmt::format("{}-{}", steps, number),
          steps,
          make_prompt(vocabulary, program),
          make_answer(vocabulary, program)};
}

std::int64_t draw_steps(std::uint64_t seed,
                        std::int64_t number,
                        std::int64_t min_steps,
                        std::int64_t max_steps) {
  BIFOCAL_REQUIRE(min_steps >= 1 && min_steps <= max_steps,
                  "[register_machine] steps must be a range from 1 up, got {} to {}",
                  min_steps,
                  max_steps);
  const double low = std::log(static_cast<double>(min_steps));
  const double high = std::log(static_cast<double>(max_steps) + 1.0);
  const double drawn =
      random_uniform(seed, stream_of("register_machine.steps"), static_cast<std::uint64_t>(number));
  return std::clamp(
      static_cast<std::int64_t>(std::exp(low + drawn * (high - low))), min_steps, max_steps);
}

std::vector<std::int32_t> solve(const RegisterVocabulary& vocabulary,
                                std::span<const std::int32_t> prompt) {
  return make_answer(vocabulary, PromptReader(vocabulary, prompt).read());
}

std::int64_t steps_of(const RegisterVocabulary& vocabulary, std::span<const std::int32_t> prompt) {
  return static_cast<std::int64_t>(PromptReader(vocabulary, prompt).read().commands.size());
}

AnswerCheck check_answer(const RegisterVocabulary& vocabulary,
                         std::span<const std::int32_t> prompt,
                         std::span<const std::int32_t> answer) {
  const std::vector<std::int32_t> right = solve(vocabulary, prompt);
  const auto [wanted, got] = std::ranges::mismatch(right, answer);
  const std::int64_t place = wanted - right.begin();
  if (wanted == right.end() && got == answer.end()) {
    return {true, -1, ""};
  }
  if (wanted == right.end()) {
    return {false, place, fmt::format("{} tokens after <end>", answer.end() - got)};
  }
  if (got == answer.end()) {
    return {false, place, fmt::format("ends after {} of {} tokens", place, right.size())};
  }
  const auto line = place / (7 + vocabulary.registers()) + 1;
  return {false,
          place,
          fmt::format("token {} (line {}) should be {}, got {}",
                      place,
                      line,
                      vocabulary.word(*wanted),
                      vocabulary.word(*got))};
}

}  // namespace bifocal
