// Graders.
#include "evaluate/grade.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <map>

#include "core/error.h"
#include "evaluate/regex.h"

namespace bifocal {

namespace {

const std::string& text_of(const Rollout& rollout) {
  BIFOCAL_REQUIRE(rollout.text.has_value(),
                  "[grade] sample {} of problem {} has no text: run rollouts with a tokenizer, or "
                  "grade with register-machine",
                  rollout.sample,
                  rollout.id);
  return *rollout.text;
}

const std::string& reference_of(const EvaluationProblem& problem) {
  BIFOCAL_REQUIRE(
      problem.answer.has_value(), "[grade] problem {} has no answer to compare with", problem.id);
  return *problem.answer;
}

// A reference is an answer, or a solution that ends in one (GSM8K's).
std::string normalized_reference(const EvaluationProblem& problem) {
  const std::string& reference = reference_of(problem);
  const std::vector<std::string_view> boxed = boxed_answers(reference);
  const std::vector<std::string_view> hashed = hash_answers(reference);
  return normalize_answer(!boxed.empty()    ? boxed.back()
                          : !hashed.empty() ? hashed.back()
                                            : std::string_view(reference));
}

// Graders of text fail alike, however they read the answer.
class TextGrader : public Grader {
 public:
  FinalAnswers final_answers(const EvaluationProblem& problem,
                             const Rollout& rollout) const override {
    const std::string& text = text_of(rollout);
    const std::string reference = normalized_reference(problem);
    std::map<std::string, std::int64_t> counts;
    FinalAnswers found;
    for (const std::string_view statement : final_statements(text)) {
      found.repeats = std::max(found.repeats, ++counts[normalize_answer(statement)]);
    }
    found.stated = counts.contains(reference);
    found.anywhere = found.stated || holds_answer(text, reference);
    return found;
  }
};

class ExactGrader final : public TextGrader {
 public:
  explicit ExactGrader(Extraction extraction) : extraction_(extraction) {}

  std::string name() const override { return "exact"; }

  Verdict grade(const EvaluationProblem& problem, const Rollout& rollout) const override {
    const auto answer = extract_answer(text_of(rollout), extraction_);
    const std::string reference = normalized_reference(problem);
    if (!answer) {
      return {};
    }
    const std::string normalized = normalize_answer(*answer);
    return {!normalized.empty() && normalized == reference, normalized};
  }

 private:
  Extraction extraction_;
};

// The harness stops generating at these; here the answer is cut there.
std::string_view cut_at_stops(std::string_view text) {
  constexpr std::array<std::string_view, 3> kStops{"Question:", "</s>", "<|im_end|>"};
  for (const std::string_view stop : kStops) {
    text = text.substr(0, text.find(stop));
  }
  return text;
}

class Gsm8kGrader final : public TextGrader {
 public:
  explicit Gsm8kGrader(Gsm8kFilter filter) : filter_(filter) {}

  std::string name() const override {
    return filter_ == Gsm8kFilter::strict_match ? "gsm8k-strict" : "gsm8k-flexible";
  }

  Verdict grade(const EvaluationProblem& problem, const Rollout& rollout) const override {
    const std::string reference = gsm8k_normalize(reference_of(problem));
    const std::string found = gsm8k_filter(cut_at_stops(text_of(rollout)), filter_);
    const std::string answer = gsm8k_normalize(found);
    Verdict verdict{.correct = answer == reference};
    if (found != kNothingMatches) {
      verdict.extracted = answer;
    }
    return verdict;
  }

 private:
  Gsm8kFilter filter_;
};

class RegisterMachineGrader final : public Grader {
 public:
  RegisterMachineGrader(std::int64_t registers, std::int64_t max_steps)
      : vocabulary_(registers, std::max<std::int64_t>(max_steps, GraderOptions{}.max_steps)) {}

  std::string name() const override { return "register-machine"; }

  Verdict grade(const EvaluationProblem& problem, const Rollout& rollout) const override {
    const std::vector<Segment> segments = last_steps(problem, rollout);
    Verdict verdict{.correct =
                        check_answer(vocabulary_, prompt_of(problem), rollout.ids).reason.empty()};
    if (!segments.empty()) {
      verdict.extracted = vocabulary_.decode(segments.back());
    }
    return verdict;
  }

  // The final answer is the line of the program's last step.
  FinalAnswers final_answers(const EvaluationProblem& problem,
                             const Rollout& rollout) const override {
    const std::vector<std::int32_t> right = solve(vocabulary_, prompt_of(problem));
    const std::vector<Segment> expected =
        steps_in(right, steps_of(vocabulary_, prompt_of(problem)));
    BIFOCAL_ASSERT(expected.size() == 1);
    std::map<Segment, std::int64_t> counts;
    FinalAnswers found;
    for (const Segment& segment : last_steps(problem, rollout)) {
      found.repeats = std::max(found.repeats, ++counts[segment]);
    }
    found.stated = counts.contains(expected.front());
    found.anywhere = !std::ranges::search(rollout.ids, expected.front()).empty();
    return found;
  }

 private:
  using Segment = std::vector<std::int32_t>;

  static const std::vector<std::int32_t>& prompt_of(const EvaluationProblem& problem) {
    BIFOCAL_REQUIRE(problem.prompt_ids.has_value(),
                    "[grade] problem {}: register-machine wants prompt_ids, which it has not",
                    problem.id);
    return *problem.prompt_ids;
  }

  std::vector<Segment> last_steps(const EvaluationProblem& problem, const Rollout& rollout) const {
    return steps_in(rollout.ids, steps_of(vocabulary_, prompt_of(problem)));
  }

  // Every "step #number ... ;" of the ids.
  std::vector<Segment> steps_in(const std::vector<std::int32_t>& ids, std::int64_t number) const {
    std::vector<Segment> found;
    const std::array<std::int32_t, 2> head{vocabulary_.step(), vocabulary_.index(number)};
    auto begin = std::ranges::search(ids, head).begin();
    while (begin != ids.end()) {
      const auto end = std::find(begin, ids.end(), vocabulary_.semicolon());
      if (end == ids.end()) {
        break;
      }
      found.emplace_back(begin, end + 1);
      begin = std::ranges::search(end, ids.end(), head.begin(), head.end()).begin();
    }
    return found;
  }

  RegisterVocabulary vocabulary_;
};

}  // namespace

std::string gsm8k_filter(std::string_view text, Gsm8kFilter filter) {
  // The first match of the first pattern, the last one of the second; of its two groups the one
  // that took part.
  static const Regex strict(R"(#### (\-?[0-9\.\,]+))");
  static const Regex flexible(R"((-?[$0-9.,]{2,})|(-?[0-9]+))");
  std::string found(kNothingMatches);
  if (filter == Gsm8kFilter::strict_match) {
    strict.for_each(text, [&](const RegexMatch& match) {
      found = match[1];
      return false;
    });
  } else {
    std::string_view last;
    flexible.for_each(text, [&](const RegexMatch& match) {
      last = match[1].empty() ? match[2] : match[1];
      return true;
    });
    found = last.empty() ? found : std::string(last);
  }
  return found;
}

std::string gsm8k_normalize(std::string_view text) {
  static const std::array<Regex, 4> ignored{
      Regex(","), Regex(R"(\$)"), Regex("(?s).*#### "), Regex(R"(\.$)")};
  std::string normalized(text);
  for (const Regex& regex : ignored) {
    normalized = regex.replace(normalized, -1);
  }
  // Letters beyond ASCII never stand in what the filters find, so their case decides nothing.
  std::ranges::transform(normalized, normalized.begin(), [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  return normalized;
}

std::unique_ptr<Grader> make_grader(std::string_view name, const GraderOptions& options) {
  if (name == "exact") {
    return std::make_unique<ExactGrader>(options.extraction);
  }
  if (name == "gsm8k-strict") {
    return std::make_unique<Gsm8kGrader>(Gsm8kFilter::strict_match);
  }
  if (name == "gsm8k-flexible") {
    return std::make_unique<Gsm8kGrader>(Gsm8kFilter::flexible_extract);
  }
  if (name == "register-machine") {
    return std::make_unique<RegisterMachineGrader>(options.registers, options.max_steps);
  }
  fail("[grade] wanted the grader exact, gsm8k-strict, gsm8k-flexible or register-machine, got {}",
       name);
}

}  // namespace bifocal
