// What a run will do, decided from sizes alone: placement, stages, what each rank holds, memory.
// `train` takes its decisions from here, so that `plan` tells what train does.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/model_config.h"
#include "config/run_config.h"
#include "parallel/mesh.h"
#include "parallel/shard.h"
#include "plan/memory_forecast.h"

namespace bifocal {

// Throws Error unless the data ranks share a step's rows evenly and every sequence rank has a
// token.
void require_rows_for_ranks(const RunConfig& config, const MeshCounts& mesh);

// Throws Error for rows longer than the model's maximum position.
void require_rows_in_model(const RunConfig& config, const ModelConfig& model);

// The division of the teacher's work; `note` says why where "auto" does not give look-ahead.
struct PlacementChoice {
  TeacherPlacement work = TeacherPlacement::look_ahead;
  std::string note;
};

// teacher.placement, where "auto" becomes look-ahead, or ulysses where the rows of a step do not
// divide by the ranks and align_steps (those that are run) are above 0. Throws Error where it
// cannot work.
PlacementChoice choose_placement(const RunConfig& config,
                                 const MeshCounts& mesh,
                                 const ModelConfig& teacher,
                                 std::int64_t align_steps);

// Whether align can compare the two layer by layer: one depth, width and head layout.
bool same_attention(const ModelConfig& a, const ModelConfig& b);

// Steps of `train`; `note` says where align is left out.
struct StageSteps {
  std::int64_t align = 0;
  std::int64_t distill = 0;
  std::string note;
};

// Align is left out where the student has nothing to train in it. Throws Error where the two models
// cannot be compared.
StageSteps choose_stages(const RunConfig& config,
                         const ModelConfig& student,
                         const ModelConfig& teacher);

// Whether a stage trains a parameter.
bool trains(StageKind stage, const RunConfig& config, const Parameter& parameter);

struct PlanInputs {
  RunConfig config;
  ModelConfig student;
  std::optional<ModelConfig> teacher;  // none: the command pretrain
  DType teacher_storage = DType::f32;  // type of the teacher's file, if it is kept as it is
  int ranks = 1;
  int ranks_per_node = 1;
  std::string limit_name = "memory.limit_gib";  // what sets config.memory.limit_gib, for errors
};

// Parameters of one kind.
struct ParameterGroup {
  std::string name;
  std::int64_t copied = 0;
  std::int64_t fresh = 0;  // new tensors of the student
};

// A stage's memory on the rank that needs most, and what its backward pass computes again:
// memory.recompute, where "auto" becomes the plan that keeps most of all that fit the limit on
// every rank (no limit: that keeps everything).
struct StageMemory {
  StageKind kind = StageKind::distill;
  RecomputePlan recompute;
  PeakBytes peak;
  int rank = 0;
};

StageMemory plan_memory(const PlanInputs& inputs, StageKind stage);

// The same of every stage that has steps, in their order.
std::vector<StageMemory> plan_stages(const PlanInputs& inputs);

// Bytes that memory.limit_gib leaves to tensors, 0 for no limit: on a GPU 3 % less, which lie
// between tensors.
double usable_bytes(const RunConfig& config);

// Changes of the configuration that would fit the stage under the limit, each with its peak:
// "optimizer.moments = \"bfloat16\" (70.12 GiB)". Every one holds for itself, with
// memory.recompute = "auto", which it names where the configuration says otherwise: one setting, or
// where no single one does all that agree with each other; and the fewest ranks that would.
std::vector<std::string> what_fits(const PlanInputs& inputs, StageKind stage);

// Throws Error, with what would fit, where `share` of the stage's peak is more than the limit
// leaves to tensors.
void require_memory(const PlanInputs& inputs, const StageMemory& memory, double share = 1.0);

struct PlannedStage {
  StageKind kind = StageKind::distill;
  std::int64_t steps = 0;
  std::int64_t tokens = 0;   // of all steps
  std::int64_t trained = 0;  // parameters
  RecomputePlan recompute;
  // Of the rank that needs most.
  PeakBytes memory;
  int largest_rank = 0;
};

// The share of one rank. Rows are those of a step, counted from 0.
struct RankShare {
  int rank = 0;
  int node = 0;
  int data_index = 0;
  int sequence_index = 0;
  ShardRange tokens;        // of each of its group's rows
  ShardRange rows;          // of its group
  ShardRange align_rows;    // in align; whole rows of its own under look-ahead
  ShardRange align_tokens;  // of each of them
};

struct Plan {
  MeshCounts mesh;
  int ranks = 1;
  int ranks_per_node = 1;
  PlacementChoice placement;
  std::string stages_note;
  std::vector<ParameterGroup> groups;
  std::int64_t copied_parameters = 0;
  std::int64_t new_parameters = 0;
  std::int64_t row_tokens = 0;
  std::int64_t rows_per_step = 0;
  std::vector<PlannedStage> stages;
  std::vector<RankShare> shares;
  // Elements, padding included, of this many: a rank's part of gradients and of each moment, the
  // weights that it holds at rest, and the teacher's part.
  std::int64_t part_elements = 0;
  std::int64_t weight_elements = 0;
  std::int64_t teacher_part_elements = 0;
  // Beside all tensors: the transport's copy of the unit whose gradient is being summed; 0 on one
  // rank.
  std::int64_t reduction_bytes = 0;
  // At once on rank 0 in a validation, which the stages' memory includes; 0: evaluate.every is 0.
  std::int64_t validation_bytes = 0;
};

// Throws Error where train or pretrain would refuse the configuration on these ranks, or
// memory.limit_gib is too small for it.
Plan make_plan(const PlanInputs& inputs);

}  // namespace bifocal
