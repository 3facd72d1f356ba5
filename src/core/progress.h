// Where a process stands in a long piece of work: written by the thread that does it, read by
// threads that watch over it.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

namespace bifocal {

struct ProgressState {
  std::string stage;      // empty before the first step
  std::int64_t step = 0;  // counted from 1; 0 before the first
  std::string phase;
  std::uint64_t marks = 0;  // steps and phases begun: it stands still where the work does

  bool operator==(const ProgressState&) const = default;
};

// "step 12 of distill, student forward", "loading the teacher"; "start" where nothing has begun.
std::string describe(const ProgressState& state);

class Progress {
 public:
  // A step of a stage begins.
  void step(std::string_view stage, std::int64_t step);

  // A part of it begins, or of what surrounds the steps. The text must outlive this.
  void phase(const char* name);

  ProgressState state() const;

 private:
  mutable std::mutex mutex_;
  std::string stage_;
  std::int64_t step_ = 0;
  const char* phase_ = "";
  std::uint64_t marks_ = 0;
};

}  // namespace bifocal
