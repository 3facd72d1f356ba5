// Reading of problem files.
#include "evaluate/problem_set.h"

#include "core/error.h"
#include "core/sha256.h"
#include "data/json_lines.h"

namespace bifocal {

namespace {

EvaluationProblem problem_of(const nlohmann::json& line) {
  BIFOCAL_REQUIRE(line.is_object() && line.contains("id"),
                  "[problems] wanted an object with id, got {}",
                  line.is_object() ? "none" : line.type_name());
  EvaluationProblem problem{.id = id_text(line["id"]), .line = line};
  if (line.contains("prompt_ids")) {
    problem.prompt_ids = int32_array(line["prompt_ids"]);
    BIFOCAL_REQUIRE(
        !problem.prompt_ids->empty(), "[problems] problem {} has an empty prompt", problem.id);
  }
  if (line.contains("messages")) {
    problem.messages = line["messages"];
  }
  if (line.contains("prompt")) {
    problem.prompt = line["prompt"].get<std::string>();
  }
  BIFOCAL_REQUIRE(problem.prompt_ids || !problem.messages.is_null() || problem.prompt,
                  "[problems] problem {}: wanted prompt_ids, messages or prompt, got none",
                  problem.id);
  if (line.contains("answer")) {
    const nlohmann::json& answer = line["answer"];
    BIFOCAL_REQUIRE(answer.is_string() || answer.is_number(),
                    "[problems] problem {}: the answer should be a text or a number, got {}",
                    problem.id,
                    answer.type_name());
    problem.answer = answer.is_string() ? answer.get<std::string>() : answer.dump();
  }
  return problem;
}

}  // namespace

std::string id_text(const nlohmann::json& id) {
  BIFOCAL_REQUIRE(id.is_string() || id.is_number_integer(),
                  "[problems] an id should be a text or a whole number, got {}",
                  id.dump());
  return id.is_string() ? id.get<std::string>() : id.dump();
}

ProblemSet ProblemSet::read(const std::string& path) {
  ProblemSet set;
  set.hash_ = sha256_hex_of_file(path);
  for_each_json_line(path, [&](const nlohmann::json& line) {
    EvaluationProblem problem = problem_of(line);
    BIFOCAL_REQUIRE(set.places_.emplace(problem.id, set.problems_.size()).second,
                    "[problems] a second problem has the id {}: give each its own",
                    problem.id);
    set.problems_.push_back(std::move(problem));
  });
  BIFOCAL_REQUIRE(!set.problems_.empty(), "[problems] {} holds no problem", path);
  return set;
}

std::optional<std::size_t> ProblemSet::find(const std::string& id) const {
  const auto found = places_.find(id);
  return found == places_.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace bifocal
