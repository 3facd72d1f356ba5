// Comparison of graded sets.
#include "evaluate/compare.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include <fmt/format.h>

#include "core/error.h"

namespace bifocal {

namespace {

constexpr double kCutOffShare = 0.05;  // more cut-off answers than this are worth a warning
constexpr std::size_t kNamedIds = 5;   // in error texts

struct Problem {
  std::string id;
  std::string group;
  double typical_tokens = 0.0;
  std::vector<std::vector<const GradedSample*>> samples;  // [sets][samples]
  std::vector<double> rates;                              // [sets]
};

double median(std::vector<double> values) {
  return quantile(values, 0.5);
}

std::string first_few(const std::vector<std::string>& ids) {
  std::string text;
  for (std::size_t i = 0; i < std::min(ids.size(), kNamedIds); ++i) {
    text += (i == 0 ? "" : ", ") + ids[i];
  }
  return ids.size() > kNamedIds ? text + ", ..." : text;
}

void check_sets(const std::vector<GradedSet>& sets) {
  BIFOCAL_REQUIRE(sets.size() >= 2, "[compare] wanted at least two sets, got {}", sets.size());
  std::set<std::string> names;
  for (const GradedSet& set : sets) {
    BIFOCAL_REQUIRE(names.insert(set.name).second,
                    "[compare] two sets are named {}: give each a --name",
                    set.name);
    BIFOCAL_REQUIRE(set.graders.front() == sets[0].graders.front(),
                    "[compare] {} is scored by {} and {} by {}: grade them alike",
                    sets[0].name,
                    sets[0].graders.front(),
                    set.name,
                    set.graders.front());
  }
}

// Problems in the first set's order, then those that only later sets have.
std::vector<Problem> collect(const std::vector<GradedSet>& sets) {
  std::vector<Problem> problems;
  std::map<std::string, std::size_t> places;
  for (std::size_t s = 0; s < sets.size(); ++s) {
    for (const GradedSample& sample : sets[s].samples) {
      const auto [place, is_new] = places.emplace(sample.id, problems.size());
      if (is_new) {
        problems.push_back({.id = sample.id, .group = sample.group});
        problems.back().samples.resize(sets.size());
      }
      Problem& problem = problems[place->second];
      BIFOCAL_REQUIRE(problem.group == sample.group,
                      "[compare] problem {} is in the groups '{}' and '{}': grade the sets alike",
                      problem.id,
                      problem.group,
                      sample.group);
      problem.samples[s].push_back(&sample);
    }
  }
  return problems;
}

// Takes out the problems that some set lacks and returns their ids.
std::vector<std::string> leave_out(std::vector<Problem>& problems,
                                   const std::vector<GradedSet>& sets,
                                   bool common_only) {
  std::vector<std::string> ids;
  const auto lacks = [](const Problem& problem) {
    return std::ranges::any_of(problem.samples, [](const auto& list) { return list.empty(); });
  };
  for (const Problem& problem : problems) {
    if (lacks(problem)) {
      ids.push_back(problem.id);
    }
  }
  BIFOCAL_REQUIRE(
      ids.empty() || common_only,
      "[compare] {} problems are not in all of the {} sets: {}; grade the same problems, "
      "or give --common",
      ids.size(),
      sets.size(),
      first_few(ids));
  std::erase_if(problems, lacks);
  BIFOCAL_REQUIRE(!problems.empty(), "[compare] no problem is in all sets");
  return ids;
}

void measure(Problem& problem) {
  std::vector<double> tokens;
  for (const auto& list : problem.samples) {
    std::int64_t correct = 0;
    for (const GradedSample* sample : list) {
      correct += sample->correct() ? 1 : 0;
      tokens.push_back(static_cast<double>(sample->tokens));
    }
    problem.rates.push_back(static_cast<double>(correct) / static_cast<double>(list.size()));
  }
  problem.typical_tokens = median(std::move(tokens));
}

GroupComparison compare_group(const std::string& name,
                              const std::vector<const Problem*>& problems,
                              const CompareOptions& options) {
  const std::size_t sets = problems[0]->rates.size();
  std::vector<std::vector<double>> rates(sets);
  std::vector<double> tokens;
  for (const Problem* problem : problems) {
    tokens.push_back(problem->typical_tokens);
    for (std::size_t s = 0; s < sets; ++s) {
      rates[s].push_back(problem->rates[s]);
    }
  }
  const BootstrapIntervals intervals =
      paired_bootstrap(rates, options.resamples, options.seed, name);
  GroupComparison group{.name = name,
                        .problems = static_cast<std::int64_t>(problems.size()),
                        .typical_tokens = median(std::move(tokens))};
  for (std::size_t s = 0; s < sets; ++s) {
    double sum = 0.0;
    for (const double rate : rates[s]) {
      sum += rate;
    }
    group.rates.push_back({sum / static_cast<double>(problems.size()), intervals.means[s]});
    if (s > 0) {
      group.differences.push_back(
          {group.rates[s].value - group.rates[0].value, intervals.differences[s - 1]});
    }
  }
  return group;
}

// Problems whose typical length lies in (above, up_to]; no group where there are none.
void add_range(const std::string& name,
               const std::vector<Problem>& problems,
               double above,
               double up_to,
               const CompareOptions& options,
               std::vector<GroupComparison>& groups) {
  std::vector<const Problem*> members;
  for (const Problem& problem : problems) {
    if (problem.typical_tokens > above && problem.typical_tokens <= up_to) {
      members.push_back(&problem);
    }
  }
  if (!members.empty()) {
    groups.push_back(compare_group(name, members, options));
  }
}

std::vector<std::int64_t> bin_edges(const std::vector<Problem>& problems,
                                    const CompareOptions& options) {
  if (!options.bin_edges.empty()) {
    BIFOCAL_REQUIRE(std::ranges::adjacent_find(options.bin_edges, std::greater_equal<>()) ==
                            options.bin_edges.end() &&
                        options.bin_edges[0] > 0,
                    "[compare] wanted the edges of bins positive and ascending");
    return options.bin_edges;
  }
  const auto longest = std::ranges::max_element(problems, {}, &Problem::typical_tokens);
  std::vector<std::int64_t> edges;
  for (std::int64_t edge = 1; static_cast<double>(edge) < longest->typical_tokens; edge *= 2) {
    edges.push_back(edge);
  }
  return edges;
}

std::vector<GroupComparison> compare_bins(const std::vector<Problem>& problems,
                                          const CompareOptions& options) {
  std::vector<GroupComparison> bins;
  const std::vector<std::int64_t> edges = bin_edges(problems, options);
  for (std::size_t b = 0; b <= edges.size(); ++b) {
    const std::int64_t above = b == 0 ? 0 : edges[b - 1];
    const bool is_last = b == edges.size();
    const std::string name =
        is_last && options.bin_edges.empty()
            ? fmt::format("{}-{}", above + 1, std::max<std::int64_t>(2 * above, 1))
        : is_last ? fmt::format("{}-", above + 1)
                  : fmt::format("{}-{}", above + 1, edges[b]);
    add_range(name,
              problems,
              b == 0 ? -1.0 : static_cast<double>(above),
              is_last ? std::numeric_limits<double>::infinity() : static_cast<double>(edges[b]),
              options,
              bins);
  }
  return bins;
}

// Numbers in numeric order before other names.
struct GroupOrder {
  static std::pair<double, std::string> key(const std::string& name) {
    double number = 0.0;
    const char* end = name.data() + name.size();
    const auto parsed = std::from_chars(name.data(), end, number);
    const bool is_number = parsed.ec == std::errc() && parsed.ptr == end && std::isfinite(number);
    return {is_number ? number : std::numeric_limits<double>::infinity(), name};
  }

  bool operator()(const std::string& a, const std::string& b) const { return key(a) < key(b); }
};

std::vector<GroupComparison> compare_groups(const std::vector<Problem>& problems,
                                            const CompareOptions& options) {
  std::map<std::string, std::vector<const Problem*>, GroupOrder> members;
  for (const Problem& problem : problems) {
    if (!problem.group.empty()) {
      members[problem.group].push_back(&problem);
    }
  }
  std::vector<GroupComparison> groups;
  groups.reserve(members.size());
  for (const auto& [name, list] : members) {
    groups.push_back(compare_group(name, list, options));
  }
  return groups;
}

std::vector<GraderAgreement> agreements_of(const GradedSet& set,
                                           std::size_t set_number,
                                           const std::vector<Problem>& problems) {
  std::vector<GraderAgreement> agreements;
  for (std::size_t g = 1; g < set.graders.size(); ++g) {
    GraderAgreement agreement{.first = set.graders[0], .second = set.graders[g]};
    for (const Problem& problem : problems) {
      std::int64_t surplus = 0;  // of correct answers by the first grader
      for (const GradedSample* sample : problem.samples[set_number]) {
        const bool first = sample->verdicts[0].correct;
        const bool second = sample->verdicts[g].correct;
        agreement.answers += first == second ? 1 : 0;
        surplus += (first ? 1 : 0) - (second ? 1 : 0);
      }
      agreement.problems += surplus == 0 ? 1 : 0;
    }
    agreements.push_back(std::move(agreement));
  }
  return agreements;
}

SetSummary summarize(const GradedSet& set,
                     std::size_t set_number,
                     const std::vector<Problem>& problems,
                     const CompareOptions& options) {
  SetSummary summary{.name = set.name, .problems = static_cast<std::int64_t>(problems.size())};
  std::vector<double> tokens;
  for (const Problem& problem : problems) {
    const auto& list = problem.samples[set_number];
    std::int64_t stated = 0;
    std::int64_t anywhere = 0;
    for (const GradedSample* sample : list) {
      const bool is_long = sample->tokens > options.long_tokens;
      const bool is_cut = !sample->stopped;
      const bool repeats = sample->final_answers.repeats >= 2;
      const bool may_be_credited = is_cut && !sample->correct();
      summary.answers += 1;
      summary.correct += sample->correct() ? 1 : 0;
      summary.long_answers += is_long ? 1 : 0;
      summary.correct_long += is_long && sample->correct() ? 1 : 0;
      summary.cut_off += is_cut ? 1 : 0;
      summary.repeating += repeats ? 1 : 0;
      summary.cut_repeating += is_cut && repeats ? 1 : 0;
      stated += may_be_credited && sample->final_answers.stated ? 1 : 0;
      anywhere += may_be_credited && sample->final_answers.anywhere ? 1 : 0;
      tokens.push_back(static_cast<double>(sample->tokens));
    }
    const double weight = 1.0 / static_cast<double>(list.size() * problems.size());
    summary.credit_stated += static_cast<double>(stated) * weight;
    summary.credit_anywhere += static_cast<double>(anywhere) * weight;
  }
  summary.median_tokens = median(std::move(tokens));
  summary.agreements = agreements_of(set, set_number, problems);
  return summary;
}

void warn_of_other_problems(const std::vector<GradedSet>& sets, Comparison& comparison) {
  std::set<std::string> hashes;
  for (const GradedSet& set : sets) {
    hashes.insert(set.problems_sha256);
  }
  hashes.erase("");
  if (hashes.size() > 1) {
    comparison.warnings.emplace_back(
        "the sets were graded with different problem files: only the ids say that problems are the "
        "same");
  }
}

void add_warnings(Comparison& comparison) {
  for (const SetSummary& set : comparison.sets) {
    const double share = static_cast<double>(set.cut_off) / static_cast<double>(set.answers);
    if (share > kCutOffShare) {
      comparison.warnings.push_back(fmt::format(
          "{:.1f} % of the answers of {} were cut off at the limit of tokens: the rates "
          "measure in part who finishes in time",
          100.0 * share,
          set.name));
    }
  }
  if (comparison.least_samples != comparison.most_samples) {
    comparison.warnings.push_back(fmt::format("problems have {} to {} samples: they weigh the same",
                                              comparison.least_samples,
                                              comparison.most_samples));
  }
  if (!comparison.left_out.empty()) {
    comparison.warnings.push_back(
        fmt::format("{} problems are not in all sets and were left out: {}",
                    comparison.left_out.size(),
                    first_few(comparison.left_out)));
  }
}

}  // namespace

Comparison compare_sets(const std::vector<GradedSet>& sets, const CompareOptions& options) {
  check_sets(sets);
  BIFOCAL_REQUIRE(
      options.resamples >= 1, "[compare] wanted at least 1 resample, got {}", options.resamples);
  Comparison comparison{.options = options,
                        .least_samples = std::numeric_limits<std::int64_t>::max()};
  std::vector<Problem> problems = collect(sets);
  comparison.left_out = leave_out(problems, sets, options.common_only);
  std::vector<const Problem*> every;
  for (Problem& problem : problems) {
    measure(problem);
    every.push_back(&problem);
    for (const auto& list : problem.samples) {
      const auto count = static_cast<std::int64_t>(list.size());
      comparison.least_samples = std::min(comparison.least_samples, count);
      comparison.most_samples = std::max(comparison.most_samples, count);
    }
  }
  comparison.all = compare_group("all", every, options);
  constexpr double kEndless = std::numeric_limits<double>::infinity();
  const auto edge = static_cast<double>(options.long_tokens);
  add_range("short", problems, -1.0, edge, options, comparison.by_length);
  add_range("long", problems, edge, kEndless, options, comparison.by_length);
  comparison.bins = compare_bins(problems, options);
  comparison.groups = compare_groups(problems, options);
  for (std::size_t s = 0; s < sets.size(); ++s) {
    comparison.sets.push_back(summarize(sets[s], s, problems, options));
  }
  add_warnings(comparison);
  warn_of_other_problems(sets, comparison);
  return comparison;
}

}  // namespace bifocal
