// The memory of a stage on the device at hand.
#pragma once

#include <string>

#include "cli/session.h"
#include "parallel/mesh.h"
#include "plan/plan.h"

namespace bifocal {

// The stage's memory before the first allocation. Where memory.limit_gib sets no limit, a device
// does. teacher: nullptr for pretraining. Collective.
StageMemory forecast_stage(const RunConfig& config,
                           const Session& session,
                           const Mesh& mesh,
                           const ModelConfig& student,
                           const ModelConfig* teacher);

// "memory forecast: recompute mlp; peak 100.00 GiB on rank 0: weights ..."
std::string describe(const StageMemory& memory);

}  // namespace bifocal
