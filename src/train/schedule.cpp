// Warm-up, constant and cosine.
#include "train/schedule.h"

#include <cmath>
#include <numbers>

namespace bifocal {

double schedule_factor(const StageConfig& stage, std::int64_t steps, std::int64_t step) {
  const auto warmup =
      static_cast<std::int64_t>(std::llround(stage.warmup * static_cast<double>(steps)));
  if (step < warmup) {
    return static_cast<double>(step + 1) / static_cast<double>(warmup);
  }
  if (stage.schedule == "constant" || stage.rate == 0.0) {
    return 1.0;
  }
  const double progress =
      static_cast<double>(step + 1 - warmup) / static_cast<double>(steps - warmup);
  const double last = stage.final_rate / stage.rate;
  return last + 0.5 * (1.0 - last) * (1.0 + std::cos(std::numbers::pi * progress));
}

}  // namespace bifocal
