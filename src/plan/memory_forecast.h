// Memory of one rank by stage, foretold from the configuration alone.
#pragma once

#include <cstdint>
#include <string_view>

#include "config/model_config.h"
#include "config/run_config.h"
#include "parallel/mesh.h"
#include "plan/memory_ledger.h"
#include "plan/recompute.h"

namespace bifocal {

enum class StageKind : std::uint8_t { align, distill, pretrain };

std::string_view name_of(StageKind stage);

// How the ranks of a row divide the teacher's work.
enum class TeacherPlacement : std::uint8_t {
  look_ahead,  // whole rows, ahead of the student
  ulysses      // the same row, heads cut over the ranks
};

// The compute type that run.dtype names.
DType compute_type(const RunConfig& config);

// The type of AdamW's moments, and whether they take no memory of a device. (On a CPU the host's
// memory is the device's.)
DType moment_type(const RunConfig& config);
bool keeps_moments_on_host(const RunConfig& config);

// Whether checkpoints are written from a copy of the state that lasts, beside the steps.
bool keeps_state_copy(const RunConfig& config);

struct ForecastInputs {
  const RunConfig& config;
  const ModelConfig& student;
  const ModelConfig* teacher = nullptr;  // none for pretrain
  MeshCounts mesh{1, 1};                 // resolved
  std::int64_t node_ranks = 1;           // that share the teacher's weights
  TeacherPlacement work = TeacherPlacement::look_ahead;
  DType teacher_storage = DType::f32;  // of the teacher's parts at rest
  RecomputePlan recompute;
};

// What Memory's peaks are after steps of `stage`, and after a validation where evaluate.every asks
// for one between steps, on a rank with this index in its sequence group, for rows that are one
// document each: the widest halos. Documents shorter than a window need less. Counted are tensors;
// not the transport's own buffers, code and libraries, and freed blocks that Memory keeps for
// reuse.
PeakBytes forecast_memory(const ForecastInputs& inputs,
                          StageKind stage,
                          std::int64_t sequence_index);

// The peaks of a validation alone, of a run with a teacher.
PeakBytes forecast_validation(const ForecastInputs& inputs, std::int64_t sequence_index);

}  // namespace bifocal
