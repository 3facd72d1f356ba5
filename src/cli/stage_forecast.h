// The memory of a run's stages on the device at hand.
#pragma once

#include <string>
#include <vector>

#include "cli/session.h"
#include "parallel/mesh.h"
#include "plan/plan.h"

namespace bifocal {

// Of every stage that has steps, in their order, asked before the first allocation. The limit is
// memory.limit_gib or what the device has free, whichever is less; on the CPU memory.limit_gib
// alone. `inputs` names configuration and models. Throws Error, with what would fit, for a stage
// that exceeds the limit by more than the forecast errs. Collective.
std::vector<StageMemory> forecast_stages(PlanInputs inputs,
                                         const Session& session,
                                         const Mesh& mesh);

// What distill or pretrain, which are the last, compute again.
RecomputePlan last_recompute(const std::vector<StageMemory>& stages);

// "memory forecast of distill: recompute mlp; peak 100.00 GiB on rank 0: weights ..."
std::string describe(const StageMemory& memory);

}  // namespace bifocal
