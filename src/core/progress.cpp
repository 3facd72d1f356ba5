// A lock is cheap here: a step has some ten phases, and a reader comes every other second.
#include "core/progress.h"

#include <fmt/format.h>

namespace bifocal {

std::string describe(const ProgressState& state) {
  const std::string step =
      state.step > 0 ? fmt::format("step {} of {}", state.step, state.stage) : "";
  if (state.phase.empty()) {
    return step.empty() ? "start" : step;
  }
  return step.empty() ? state.phase : fmt::format("{}, {}", step, state.phase);
}

void Progress::step(std::string_view stage, std::int64_t step) {
  const std::lock_guard lock(mutex_);
  stage_ = stage;
  step_ = step;
  phase_ = "";
  ++marks_;
}

void Progress::phase(const char* name) {
  const std::lock_guard lock(mutex_);
  phase_ = name;
  ++marks_;
}

ProgressState Progress::state() const {
  const std::lock_guard lock(mutex_);
  return {.stage = stage_, .step = step_, .phase = phase_, .marks = marks_};
}

}  // namespace bifocal
