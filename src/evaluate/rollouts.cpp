// Dealing samples to ranks and drawing them.
#include "evaluate/rollouts.h"

#include <array>

#include "core/error.h"

namespace bifocal {

std::vector<RolloutTask> tasks_of_rank(const std::vector<std::uint8_t>& done,
                                       std::int64_t samples,
                                       int rank,
                                       int ranks) {
  const std::int64_t problems = static_cast<std::int64_t>(done.size()) / samples;
  const auto is_done = [&](std::int64_t problem, std::int64_t sample) {
    return done[static_cast<std::size_t>(problem * samples + sample)] != 0;
  };
  std::vector<RolloutTask> missing;
  std::vector<std::int64_t> turn;  // [missing]: the number of its problem among those that lack one
  std::int64_t lacking = 0;
  for (std::int64_t problem = 0; problem < problems; ++problem) {
    const std::size_t before = missing.size();
    for (std::int64_t sample = 0; sample < samples; ++sample) {
      if (!is_done(problem, sample)) {
        missing.push_back({problem, sample});
        turn.push_back(lacking);
      }
    }
    lacking += missing.size() > before ? 1 : 0;
  }
  std::vector<RolloutTask> mine;
  for (std::size_t i = 0; i < missing.size(); ++i) {
    const std::int64_t number = lacking >= ranks ? turn[i] : static_cast<std::int64_t>(i);
    if (number % ranks == rank) {
      mine.push_back(missing[i]);
    }
  }
  return mine;
}

RolloutReport draw_rollouts(
    Communicator& world,
    RolloutDirectory& directory,
    const ProblemSet& problems,
    std::int64_t samples,
    const Answerer& answer,
    const std::function<void(std::int64_t drawn, std::int64_t of, std::int64_t tokens)>& progress) {
  const std::vector<RolloutTask> tasks =
      tasks_of_rank(directory.done(), samples, world.rank(), world.size());
  std::array<std::int64_t, 2> counts{};  // drawn, tokens
  if (!tasks.empty()) {
    answer(tasks, [&](std::size_t task, Rollout rollout) {
      rollout.id = problems.problems()[static_cast<std::size_t>(tasks[task].problem)].id;
      rollout.sample = tasks[task].sample;
      counts[0] += 1;
      counts[1] += rollout.tokens;
      directory.append(rollout);
      progress(counts[0], static_cast<std::int64_t>(tasks.size()), counts[1]);
    });
  }
  BIFOCAL_ASSERT(counts[0] == static_cast<std::int64_t>(tasks.size()));
  world.all_reduce_sum({counts.data(), DType::i64, {2}});
  directory.merge();
  return {static_cast<std::int64_t>(directory.done().size()), counts[0], counts[1]};
}

}  // namespace bifocal
