// Grading a whole set of rollouts; writing and reading the result.
#include "evaluate/graded_file.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/error.h"
#include "core/file.h"
#include "data/json_lines.h"

namespace bifocal {

namespace {

using Json = nlohmann::ordered_json;

constexpr int kVersion = 1;
constexpr const char* kFormat = "bifocal graded";

std::string group_of(const EvaluationProblem& problem, const std::string& group_by) {
  const std::string field = group_by.empty() ? "group" : group_by;
  if (!problem.line.contains(field)) {
    BIFOCAL_REQUIRE(
        group_by.empty(), "[grade] problem {} has no field {} to group by", problem.id, group_by);
    return {};
  }
  const nlohmann::json& value = problem.line[field];
  BIFOCAL_REQUIRE(value.is_string() || value.is_number() || value.is_boolean(),
                  "[grade] problem {}: the field {} should be a text or a number, got {}",
                  problem.id,
                  field,
                  value.type_name());
  return value.is_string() ? value.get<std::string>() : value.dump();
}

void require_complete(const ProblemSet& problems, const std::vector<std::int64_t>& counts) {
  const std::int64_t most = *std::ranges::max_element(counts);
  for (std::size_t p = 0; p < counts.size(); ++p) {
    BIFOCAL_REQUIRE(counts[p] == most,
                    "[grade] problem {} has {} samples where others have {}: finish the run, or "
                    "give --partial",
                    problems.problems()[p].id,
                    counts[p],
                    most);
  }
}

Json sample_line(const GradedSet& set, const GradedSample& sample) {
  Json line{{"id", sample.id}, {"sample", sample.sample}};
  if (!sample.group.empty()) {
    line["group"] = sample.group;
  }
  line["tokens"] = sample.tokens;
  line["finish_reason"] = sample.stopped ? "stop" : "length";
  line["correct"] = sample.correct();
  line["stated"] = sample.final_answers.stated;
  line["anywhere"] = sample.final_answers.anywhere;
  line["repeats"] = sample.final_answers.repeats;
  for (std::size_t g = 0; g < set.graders.size(); ++g) {
    const Verdict& verdict = sample.verdicts[g];
    line["graders"][set.graders[g]] = {{"correct", verdict.correct}, {"extracted", nullptr}};
    if (verdict.extracted) {
      line["graders"][set.graders[g]]["extracted"] = *verdict.extracted;
    }
  }
  return line;
}

GradedSample parse_sample(const nlohmann::json& line, const std::vector<std::string>& graders) {
  GradedSample sample{.id = id_text(line.at("id")),
                      .group = line.value("group", ""),
                      .sample = line.at("sample").get<std::int64_t>(),
                      .tokens = line.at("tokens").get<std::int64_t>(),
                      .stopped = line.at("finish_reason").get<std::string>() == "stop"};
  sample.final_answers = {.repeats = line.at("repeats").get<std::int64_t>(),
                          .stated = line.at("stated").get<bool>(),
                          .anywhere = line.at("anywhere").get<bool>()};
  for (const std::string& grader : graders) {
    const nlohmann::json& verdict = line.at("graders").at(grader);
    sample.verdicts.push_back({.correct = verdict.at("correct").get<bool>()});
    if (!verdict.at("extracted").is_null()) {
      sample.verdicts.back().extracted = verdict["extracted"].get<std::string>();
    }
  }
  BIFOCAL_REQUIRE(line.at("correct").get<bool>() == sample.correct(),
                  "[grade] sample {} of {}: correct is not what {} says",
                  sample.sample,
                  sample.id,
                  graders.front());
  return sample;
}

void parse_header(const nlohmann::json& line, GradedSet& set) {
  BIFOCAL_REQUIRE(
      line.is_object() && line.value("format", "") == kFormat,
      "[grade] wanted a file that `bifocal grade` wrote, its first line says otherwise");
  BIFOCAL_REQUIRE(line.value("version", 0) == kVersion,
                  "[grade] this file has version {}, this program reads version {}",
                  line.value("version", 0),
                  kVersion);
  set.name = line.at("name").get<std::string>();
  set.problems_sha256 = line.value("problems_sha256", "");
  set.graders = line.at("graders").get<std::vector<std::string>>();
  BIFOCAL_REQUIRE(!set.graders.empty(), "[grade] wanted at least one grader, got none");
}

}  // namespace

GradedSet grade_rollouts(const std::string& name,
                         const ProblemSet& problems,
                         const std::vector<Rollout>& rollouts,
                         const std::vector<std::unique_ptr<Grader>>& graders,
                         const std::string& group_by,
                         bool partial) {
  BIFOCAL_REQUIRE(!graders.empty(), "[grade] wanted at least one grader, got none");
  GradedSet set{.name = name, .problems_sha256 = problems.hash()};
  for (const auto& grader : graders) {
    BIFOCAL_REQUIRE(std::ranges::find(set.graders, grader->name()) == set.graders.end(),
                    "[grade] the grader {} is given twice",
                    grader->name());
    set.graders.push_back(grader->name());
  }
  std::vector<std::pair<std::size_t, const Rollout*>> order;
  std::vector<std::int64_t> counts(problems.problems().size());
  for (const Rollout& rollout : rollouts) {
    const auto place = problems.find(rollout.id);
    BIFOCAL_REQUIRE(place.has_value(),
                    "[grade] the rollouts answer problem {}, which the problem file has not",
                    rollout.id);
    order.emplace_back(*place, &rollout);
    ++counts[*place];
  }
  if (!partial) {
    require_complete(problems, counts);
  }
  std::ranges::sort(
      order, {}, [](const auto& entry) { return std::pair(entry.first, entry.second->sample); });
  for (const auto& [place, rollout] : order) {
    const EvaluationProblem& problem = problems.problems()[place];
    GradedSample sample{.id = rollout->id,
                        .group = group_of(problem, group_by),
                        .sample = rollout->sample,
                        .tokens = rollout->tokens,
                        .stopped = rollout->stopped};
    for (const auto& grader : graders) {
      sample.verdicts.push_back(grader->grade(problem, *rollout));
    }
    sample.final_answers = graders.front()->final_answers(problem, *rollout);
    set.samples.push_back(std::move(sample));
  }
  return set;
}

void write_graded(const std::filesystem::path& path, const GradedSet& set) {
  const auto dump = [](const Json& json) {
    return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  };
  std::string text = dump({{"format", kFormat},
                           {"version", kVersion},
                           {"name", set.name},
                           {"graders", set.graders},
                           {"problems_sha256", set.problems_sha256}});
  for (const GradedSample& sample : set.samples) {
    text += dump(sample_line(set, sample));
  }
  write_file_atomically(path, text);
}

GradedSet read_graded(const std::filesystem::path& path) {
  GradedSet set;
  std::set<std::pair<std::string, std::int64_t>> seen;
  for_each_json_line(path.string(), [&](const nlohmann::json& line) {
    if (set.graders.empty()) {
      parse_header(line, set);
      return;
    }
    set.samples.push_back(parse_sample(line, set.graders));
    const GradedSample& sample = set.samples.back();
    BIFOCAL_REQUIRE(seen.emplace(sample.id, sample.sample).second,
                    "[grade] a second time sample {} of problem {}",
                    sample.sample,
                    sample.id);
  });
  BIFOCAL_REQUIRE(!set.samples.empty(), "[grade] {} holds no graded sample", path.string());
  return set;
}

}  // namespace bifocal
