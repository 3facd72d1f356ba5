// Grading of answers: what is right, and how wrong ones fail.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/register_machine.h"
#include "evaluate/answer_extraction.h"
#include "evaluate/problem_set.h"

namespace bifocal {

// One sampled answer to a problem; a line of a rollouts file (rollout_file.h).
struct Rollout {
  std::string id;  // of the problem
  std::int64_t sample = 0;
  std::optional<std::string> text;
  std::vector<std::int32_t> ids;
  std::int64_t tokens = 0;
  bool stopped = false;  // false: cut off at the limit of tokens
};

struct Verdict {
  bool correct = false;
  std::optional<std::string> extracted;  // normalised; nullopt: no answer found
};

// How an answer came to its end.
struct FinalAnswers {
  std::int64_t repeats = 0;  // how often the final answer that is stated most often is stated
  bool stated = false;       // the right answer is among the stated ones
  bool anywhere = false;     // the right answer stands anywhere
};

class Grader {
 public:
  Grader() = default;
  Grader(const Grader&) = delete;
  Grader& operator=(const Grader&) = delete;
  Grader(Grader&&) = delete;
  Grader& operator=(Grader&&) = delete;
  virtual ~Grader() = default;

  virtual std::string name() const = 0;

  // Both throw Error where the problem lacks what the grader compares with, or the rollout what it
  // reads (the text of answers, or their ids).
  virtual Verdict grade(const EvaluationProblem& problem, const Rollout& rollout) const = 0;
  virtual FinalAnswers final_answers(const EvaluationProblem& problem,
                                     const Rollout& rollout) const = 0;
};

struct GraderOptions {
  Extraction extraction = Extraction::automatic;  // of `exact`
  std::int64_t registers = 10;                    // of `register-machine`
  std::int64_t max_steps = 63;
};

// exact: the extracted answer equals the reference, both normalised.
// gsm8k-strict, gsm8k-flexible: the filters strict-match and flexible-extract of
// lm-evaluation-harness's task gsm8k (version 3) and its exact_match.
// register-machine: data/register_machine.h's checker on ids.
// Throws Error naming these for any other name.
std::unique_ptr<Grader> make_grader(std::string_view name, const GraderOptions& options = {});

// What lm-evaluation-harness's filters say where nothing matches.
inline constexpr std::string_view kNothingMatches = "[invalid]";

// What lm-evaluation-harness's filters make of an answer; kNothingMatches where nothing does.
enum class Gsm8kFilter : std::uint8_t { strict_match, flexible_extract };
std::string gsm8k_filter(std::string_view text, Gsm8kFilter filter);

// Its exact_match compares both sides in this form: without commas, dollar signs, everything up to
// the last "#### " and a full stop at the end, in lower case.
std::string gsm8k_normalize(std::string_view text);

}  // namespace bifocal
