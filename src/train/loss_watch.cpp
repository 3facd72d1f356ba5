// A running window of losses. It is summed anew each time: 128 values a step cost nothing, and no
// rounding piles up.
#include "train/loss_watch.h"

#include <cmath>

namespace bifocal {

double LossWatch::mean() const {
  double sum = 0.0;
  for (const double loss : losses_) {
    sum += loss;
  }
  return losses_.empty() ? 0.0 : sum / static_cast<double>(losses_.size());
}

double LossWatch::deviation() const {
  const double centre = mean();
  double squares = 0.0;
  for (const double loss : losses_) {
    squares += (loss - centre) * (loss - centre);
  }
  return losses_.empty() ? 0.0 : std::sqrt(squares / static_cast<double>(losses_.size()));
}

bool LossWatch::is_spike(double loss) {
  const bool stands_out = losses_.size() >= kLeast && loss > mean() + kDeviations * deviation();
  losses_.push_back(loss);
  if (losses_.size() > kWindow) {
    losses_.pop_front();
  }
  return stands_out;
}

}  // namespace bifocal
