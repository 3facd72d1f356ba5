// Files of register-machine problems and of answers to them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/register_machine.h"

namespace bifocal {

// One JSON line without its line break: id, steps, prompt_ids, answer_ids, prompt, answer (the
// last two in words).
std::string problem_line(const RegisterVocabulary& vocabulary, const RegisterProblem& problem);

// Problems of a JSON-lines file with id and prompt_ids; steps and answers are computed, and where
// the file has them they must agree. Throws Error that names file and line.
std::vector<RegisterProblem> read_problems(const RegisterVocabulary& vocabulary,
                                           const std::string& path);

// Solved problems of one step count.
struct SolvedRate {
  std::int64_t steps = 0;
  std::int64_t problems = 0;
  std::int64_t answered = 0;
  std::int64_t solved = 0;
};

struct SolvedReport {
  std::vector<SolvedRate> by_steps;   // ascending
  std::vector<std::string> failures;  // "id: reason", in the problems' order
};

// Checks an answers file, JSON lines with id and answer_ids or answer (words), against a problems
// file. Problems without an answer count as unsolved. Throws Error for an unknown or repeated id.
SolvedReport check_answers(const RegisterVocabulary& vocabulary,
                           const std::string& problems_path,
                           const std::string& answers_path);

}  // namespace bifocal
