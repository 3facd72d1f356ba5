// Drawing many sampled answers to many problems, on any number of ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "evaluate/rollout_file.h"

namespace bifocal {

struct RolloutTask {
  std::int64_t problem = 0;  // its place in the file
  std::int64_t sample = 0;

  // Of its random numbers: the same whoever draws it and when.
  std::uint64_t stream() const {
    return (static_cast<std::uint64_t>(problem) << 24U) + static_cast<std::uint64_t>(sample);
  }
};

constexpr std::int64_t kMostSamples = std::int64_t{1} << 24;  // per problem, by the stream's form

// Answers all tasks, each a function of its problem and stream alone, and calls finished for each
// as soon as it is there, in any order. The rollout's id and sample are filled in by the caller.
using Answerer =
    std::function<void(std::span<const RolloutTask> tasks,
                       const std::function<void(std::size_t task, Rollout rollout)>& finished)>;

struct RolloutReport {
  std::int64_t samples = 0;  // in the finished file
  std::int64_t drawn = 0;    // by this run, all ranks
  std::int64_t tokens = 0;   // of those
};

// Draws the samples that the directory lacks: problems that lack one are dealt to the ranks in
// turn, or single samples where there are fewer problems than ranks. Then merges the parts.
// progress is called after each sample with this rank's counts. Collective.
RolloutReport draw_rollouts(
    Communicator& world,
    RolloutDirectory& directory,
    const ProblemSet& problems,
    std::int64_t samples,
    const Answerer& answer,
    const std::function<void(std::int64_t drawn, std::int64_t of, std::int64_t tokens)>& progress);

// The tasks of one rank. done: [problems * samples].
std::vector<RolloutTask> tasks_of_rank(const std::vector<std::uint8_t>& done,
                                       std::int64_t samples,
                                       int rank,
                                       int ranks);

}  // namespace bifocal
