// Register-machine problems: a numbered program over registers of one digit each, whose answer
// writes every step with the whole register line. Vocabulary, generator, solver and checker.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace bifocal {

// Ids: digits 0..9, registers r0.., indices #0..#max_steps, the words below, <unused0>.. up to a
// multiple of 64. The default is the vocabulary of the models under data/register-machine.
class RegisterVocabulary {
 public:
  explicit RegisterVocabulary(std::int64_t registers = 10, std::int64_t max_steps = 63);

  std::int64_t registers() const { return registers_; }

  std::int64_t max_steps() const { return max_steps_; }

  std::int64_t size() const { return static_cast<std::int64_t>(words_.size()); }

  const std::vector<std::string>& words() const { return words_; }  // by id

  std::int32_t digit(std::int64_t value) const { return static_cast<std::int32_t>(value); }

  std::int32_t reg(std::int64_t number) const { return static_cast<std::int32_t>(10 + number); }

  std::int32_t index(std::int64_t step) const {
    return static_cast<std::int32_t>(10 + registers_ + step);
  }

  std::int32_t problem() const { return special(0); }

  std::int32_t program() const { return special(1); }

  std::int32_t answer() const { return special(2); }

  std::int32_t step() const { return special(3); }

  std::int32_t add() const { return special(4); }

  std::int32_t set() const { return special(5); }

  std::int32_t colon() const { return special(6); }

  std::int32_t semicolon() const { return special(7); }

  std::int32_t end() const { return special(8); }

  std::int32_t end_of_text() const { return special(9); }  // <end>

  std::int32_t pad() const { return special(10); }

  // The word of an id, or "id N" for a number outside the vocabulary.
  std::string word(std::int32_t id) const;

  // Words joined by single spaces.
  std::string decode(std::span<const std::int32_t> ids) const;

  // Ids of words parted by white space. Throws Error that names an unknown word.
  std::vector<std::int32_t> encode(std::string_view text) const;

  // tokenizer.json: a WordLevel model behind a WhitespaceSplit pre-tokenizer.
  std::string tokenizer_json() const;

 private:
  std::int32_t special(std::int64_t number) const {
    return static_cast<std::int32_t>(10 + registers_ + max_steps_ + 1 + number);
  }

  std::int64_t registers_;
  std::int64_t max_steps_;
  std::vector<std::string> words_;
  std::unordered_map<std::string, std::int32_t> ids_;
};

struct RegisterProblem {
  std::string id;
  std::int64_t steps = 0;
  std::vector<std::int32_t> prompt;  // <problem> (register digit)*K program (#n op rX d)*N answer
  std::vector<std::int32_t> answer;  // (step #n op rX d : digit*K ;)*N end <end>
};

// Problem `number` of a seed: a function of (seed, number, steps) alone. Its id is "steps-number".
RegisterProblem make_problem(const RegisterVocabulary& vocabulary,
                             std::uint64_t seed,
                             std::int64_t number,
                             std::int64_t steps);

// A step count for problem `number`, log-uniform over min_steps..max_steps.
std::int64_t draw_steps(std::uint64_t seed,
                        std::int64_t number,
                        std::int64_t min_steps,
                        std::int64_t max_steps);

// The one right answer to a prompt. Throws Error where the prompt is not well formed.
std::vector<std::int32_t> solve(const RegisterVocabulary& vocabulary,
                                std::span<const std::int32_t> prompt);

// The number of steps of a well-formed prompt.
std::int64_t steps_of(const RegisterVocabulary& vocabulary, std::span<const std::int32_t> prompt);

struct AnswerCheck {
  bool correct = false;
  std::int64_t first_wrong = -1;  // index in the answer; its length where tokens are missing
  std::string reason;             // empty when correct
};

// Compares an answer with solve(): the whole of it, <end> included, must be there.
AnswerCheck check_answer(const RegisterVocabulary& vocabulary,
                         std::span<const std::int32_t> prompt,
                         std::span<const std::int32_t> answer);

}  // namespace bifocal
