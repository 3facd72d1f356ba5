// Sets of graded answers to the same problems side by side, by how long the answers are.
//
// A set's rate on a problem is the share of its samples that are correct; its rate on a group of
// problems is the mean over them (pass@1). A problem's typical length is the median of the tokens
// of all answers of all sets to it. Intervals: evaluate/bootstrap.h, over problems. Differences are
// against the first set.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "evaluate/bootstrap.h"
#include "evaluate/graded_file.h"

namespace bifocal {

struct CompareOptions {
  std::int64_t long_tokens = 4000;  // answers and problems above it are long
  std::vector<std::int64_t>
      bin_edges{};  // ascending lengths that part the bins; empty: powers of 2
  std::int64_t resamples = 20'000;
  std::uint64_t seed = 0;
  bool common_only = false;  // leave out problems that some set lacks, instead of refusing them
};

struct Estimate {
  double value = 0.0;
  Interval interval;
};

struct GroupComparison {
  std::string name;
  std::int64_t problems = 0;
  double typical_tokens = 0.0;        // median of the problems' typical lengths
  std::vector<Estimate> rates;        // [sets]
  std::vector<Estimate> differences;  // [sets - 1], against the first set
};

// How two graders of one set agree.
struct GraderAgreement {
  std::string first;
  std::string second;
  std::int64_t answers = 0;   // on which both say the same
  std::int64_t problems = 0;  // on which both find as many correct
};

struct SetSummary {
  std::string name;
  std::int64_t problems = 0;
  std::int64_t answers = 0;
  std::int64_t correct = 0;
  std::int64_t long_answers = 0;   // of more than long_tokens tokens
  std::int64_t correct_long = 0;   // correct ones of these
  double median_tokens = 0.0;      // of answers
  std::int64_t cut_off = 0;        // at the limit of tokens
  std::int64_t repeating = 0;      // state a final answer twice or more
  std::int64_t cut_repeating = 0;  // cut off and repeating
  // What all answers that were cut off would add to the rate if they counted as correct where the
  // right answer is among their final answers, or stands anywhere in them.
  double credit_stated = 0.0;
  double credit_anywhere = 0.0;
  std::vector<GraderAgreement> agreements;  // of the first grader with each other one
};

struct Comparison {
  CompareOptions options;
  std::vector<SetSummary> sets;
  std::int64_t least_samples = 0;  // per problem, over all sets
  std::int64_t most_samples = 0;
  GroupComparison all;
  std::vector<GroupComparison> by_length;  // short, long; those that hold problems
  std::vector<GroupComparison> bins;       // by typical length, those that hold problems
  std::vector<GroupComparison> groups;     // by the samples' group; numbers in numeric order
  std::vector<std::string> left_out;       // ids of problems that some set lacks
  std::vector<std::string> warnings;
};

// At least two sets of distinct names. Throws Error for problems that are not in all sets (unless
// common_only), for a problem in different groups, and for no common problem.
Comparison compare_sets(const std::vector<GradedSet>& sets, const CompareOptions& options);

}  // namespace bifocal
