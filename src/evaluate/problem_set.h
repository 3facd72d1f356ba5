// Problems to answer and to grade: JSON lines of id, prompt and reference answer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <nlohmann/json.hpp>

namespace bifocal {

// One line. At least one of the three prompts stands in it; where there are several, prompt_ids
// comes before messages and messages before prompt.
struct EvaluationProblem {
  std::string id;  // of a text, or the digits of a whole number
  std::optional<std::vector<std::int32_t>> prompt_ids;
  nlohmann::json messages;  // as chat data has them; null: none
  std::optional<std::string> prompt;
  std::optional<std::string> answer;  // the reference; a JSON number is read as its digits
  nlohmann::json line;                // the whole line
};

class ProblemSet {
 public:
  // Throws Error with file and line for a line without id or prompt, for a repeated id and for
  // fields of a wrong type; and for a file without problems.
  static ProblemSet read(const std::string& path);

  const std::vector<EvaluationProblem>& problems() const { return problems_; }

  // The place of a problem; nullopt for an id that the file has not.
  std::optional<std::size_t> find(const std::string& id) const;

  // SHA-256 of the file.
  const std::string& hash() const { return hash_; }

 private:
  std::vector<EvaluationProblem> problems_;
  std::unordered_map<std::string, std::size_t> places_;
  std::string hash_;
};

// A text, or the digits of a whole number. Throws Error for anything else.
std::string id_text(const nlohmann::json& id);

}  // namespace bifocal
