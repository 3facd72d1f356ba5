// Which losses stand out of those before.
#pragma once

#include <cstddef>
#include <deque>

namespace bifocal {

// Remembers the last losses of a stage. Not more than `window`, and silent before `least`.
class LossWatch {
 public:
  static constexpr std::size_t kWindow = 128;
  static constexpr std::size_t kLeast = 20;
  static constexpr double kDeviations = 4.0;

  // Whether the loss lies more than kDeviations standard deviations above the mean of the window;
  // then takes it in. loss is finite.
  bool is_spike(double loss);

  double mean() const;
  double deviation() const;

  void reset() { losses_.clear(); }

 private:
  std::deque<double> losses_;
};

}  // namespace bifocal
