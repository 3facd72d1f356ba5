// The CPU's clock, and phases by name.
#include "ops/timer.h"

#include <chrono>
#include <utility>

namespace bifocal {

namespace {

class CpuClock : public StreamClock {
 public:
  void mark() override { marks_.push_back(std::chrono::steady_clock::now()); }

  std::vector<double> take() override {
    std::vector<double> seconds;
    for (std::size_t i = 1; i < marks_.size(); ++i) {
      seconds.push_back(std::chrono::duration<double>(marks_[i] - marks_[i - 1]).count());
    }
    marks_.clear();
    return seconds;
  }

 private:
  std::vector<std::chrono::steady_clock::time_point> marks_;
};

}  // namespace

std::unique_ptr<StreamClock> make_clock(CpuStream&) {
  return std::make_unique<CpuClock>();
}

void Timeline::clear() {
  clock_->take();
  names_.clear();
}

void Timeline::phase(const std::string& name) {
  names_.push_back(name);
  clock_->mark();
}

std::map<std::string, double> Timeline::take() {
  clock_->mark();
  const std::vector<double> seconds = clock_->take();
  const std::vector<std::string> names = std::exchange(names_, {});
  std::map<std::string, double> by_name;
  for (std::size_t i = 0; i < seconds.size(); ++i) {
    by_name[names[i]] += seconds[i];
  }
  return by_name;
}

}  // namespace bifocal
