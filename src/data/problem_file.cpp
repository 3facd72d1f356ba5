// Reading, writing and checking of register-machine files.
#include "data/problem_file.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "data/json_lines.h"

namespace bifocal {

namespace {

using Json = nlohmann::json;

std::string json_array(std::span<const std::int32_t> ids) {
  std::string text = "[";
  for (const std::int32_t id : ids) {
    text += text.size() == 1 ? "" : ",";
    text += std::to_string(id);
  }
  return text + "]";
}

// What is wrong with the answer on a line of an answers file; empty when nothing is.
std::string fault_of(const RegisterVocabulary& vocabulary,
                     const RegisterProblem& problem,
                     const Json& line) {
  if (line.contains("answer_ids")) {
    const std::vector<std::int32_t> ids = int32_array(line["answer_ids"]);
    return check_answer(vocabulary, problem.prompt, ids).reason;
  }
  const auto text = line.at("answer").get<std::string>();
  std::vector<std::int32_t> ids;
  try {
    ids = vocabulary.encode(text);
  } catch (const Error& error) {
    return error.what();  // a model may write anything: a wrong answer, not a broken file
  }
  return check_answer(vocabulary, problem.prompt, ids).reason;
}

// A problem of one line, solved; what the line says beside the prompt must agree.
RegisterProblem problem_of(const RegisterVocabulary& vocabulary, const Json& line) {
  RegisterProblem problem;
  problem.id = line.at("id").get<std::string>();
  problem.prompt = int32_array(line.at("prompt_ids"));
  problem.answer = solve(vocabulary, problem.prompt);
  problem.steps = steps_of(vocabulary, problem.prompt);
  const auto steps = line.value("steps", problem.steps);
  BIFOCAL_REQUIRE(steps == problem.steps,
                  "[register_machine] problem {} says {} steps and has {}",
                  problem.id,
                  steps,
                  problem.steps);
  if (line.contains("answer_ids")) {
    const std::string fault = fault_of(vocabulary, problem, line);
    BIFOCAL_REQUIRE(fault.empty(),
                    "[register_machine] the answer of problem {} is wrong: {}",
                    problem.id,
                    fault);
  }
  return problem;
}

}  // namespace

std::string problem_line(const RegisterVocabulary& vocabulary, const RegisterProblem& problem) {
  return "{\"id\":\"" + problem.id + "\",\"steps\":" + std::to_string(problem.steps) +
         ",\"prompt_ids\":" + json_array(problem.prompt) +
         ",\"answer_ids\":" + json_array(problem.answer) + ",\"prompt\":\"" +
         vocabulary.decode(problem.prompt) + "\",\"answer\":\"" +
         vocabulary.decode(problem.answer) + "\"}";
}

std::vector<RegisterProblem> read_problems(const RegisterVocabulary& vocabulary,
                                           const std::string& path) {
  std::vector<RegisterProblem> problems;
  for_each_json_line(path,
                     [&](const Json& line) { problems.push_back(problem_of(vocabulary, line)); });
  BIFOCAL_REQUIRE(!problems.empty(), "[register_machine] {} holds no problem", path);
  return problems;
}

SolvedReport check_answers(const RegisterVocabulary& vocabulary,
                           const std::string& problems_path,
                           const std::string& answers_path) {
  const std::vector<RegisterProblem> problems = read_problems(vocabulary, problems_path);
  std::unordered_map<std::string, std::size_t> place;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    BIFOCAL_REQUIRE(place.emplace(problems[i].id, i).second,
                    "[register_machine] {} has two problems with id {}",
                    problems_path,
                    problems[i].id);
  }
  std::vector<std::string> reasons(problems.size(), "no answer");
  std::vector<bool> answered(problems.size(), false);
  for_each_json_line(answers_path, [&](const Json& line) {
    const auto id = line.at("id").get<std::string>();
    const auto found = place.find(id);
    BIFOCAL_REQUIRE(found != place.end(), "[register_machine] no problem has the id {}", id);
    const std::size_t i = found->second;
    BIFOCAL_REQUIRE(!answered[i], "[register_machine] a second answer to problem {}", id);
    answered[i] = true;
    reasons[i] = fault_of(vocabulary, problems[i], line);
  });
  std::map<std::int64_t, SolvedRate> rates;
  SolvedReport report;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    SolvedRate& rate = rates[problems[i].steps];
    rate.steps = problems[i].steps;
    rate.problems += 1;
    rate.answered += answered[i] ? 1 : 0;
    rate.solved += reasons[i].empty() ? 1 : 0;
    if (!reasons[i].empty()) {
      report.failures.push_back(fmt::format("{}: {}", problems[i].id, reasons[i]));
    }
  }
  std::ranges::transform(
      rates, std::back_inserter(report.by_steps), [](const auto& entry) { return entry.second; });
  return report;
}

}  // namespace bifocal
