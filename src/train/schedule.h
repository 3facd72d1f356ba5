// The learning rate of a step.
#pragma once

#include <cstdint>

#include "config/run_config.h"

namespace bifocal {

// Rate of step `step` (from 0) as a share of the stage's rate: linear over the first warmup * steps
// steps, then constant, or a cosine that reaches final_rate / rate at the last step.
double schedule_factor(const StageConfig& stage, std::int64_t steps, std::int64_t step);

}  // namespace bifocal
