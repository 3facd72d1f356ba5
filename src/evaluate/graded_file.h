// Files of graded answers: a header line, then a line per sample.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "evaluate/grade.h"

namespace bifocal {

struct GradedSample {
  std::string id;
  std::string group;  // empty: none
  std::int64_t sample = 0;
  std::int64_t tokens = 0;
  bool stopped = false;
  std::vector<Verdict> verdicts;  // [graders]; the first is the score
  FinalAnswers final_answers;

  bool correct() const { return verdicts.front().correct; }
};

struct GradedSet {
  std::string name;                   // of what answered
  std::vector<std::string> graders;   // at least one
  std::vector<GradedSample> samples;  // by problem in the problem file's order, then by sample
  std::string problems_sha256;        // of the problem file; empty: not known
};

// Grades every rollout. group_by: a field of the problems' lines that names their group; empty:
// "group", where a line has it. Throws Error for a rollout of an unknown problem, for problems
// without the field that was asked for, and, unless partial, for problems without a rollout or
// with fewer than others.
GradedSet grade_rollouts(const std::string& name,
                         const ProblemSet& problems,
                         const std::vector<Rollout>& rollouts,
                         const std::vector<std::unique_ptr<Grader>>& graders,
                         const std::string& group_by,
                         bool partial);

void write_graded(const std::filesystem::path& path, const GradedSet& set);

// Throws Error with file and line for what write_graded did not write, and for a repeated sample.
GradedSet read_graded(const std::filesystem::path& path);

}  // namespace bifocal
