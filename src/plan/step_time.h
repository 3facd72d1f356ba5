// How long a step of each stage takes on GPUs, foretold from sizes and measured speeds.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/gpu_speed.h"
#include "plan/plan.h"

namespace bifocal {

// What is assumed beside a plan.
struct MachineAssumptions {
  GpuSpeed gpu;
  double network = 50e9;             // bytes/s that a GPU receives from other hosts
  std::int64_t document_tokens = 0;  // of each document of a row; 0: rows are one document
};

// The mean over steps, on one rank; seconds.
struct StepSeconds {
  double teacher = 0.0;
  double student_forward = 0.0;
  double head = 0.0;  // and loss
  double student_backward = 0.0;
  double recomputed = 0.0;  // in the backward pass, not counted in student_backward
  double optimizer = 0.0;
  double communication = 0.0;  // nothing is taken to hide behind the kernels

  double total() const {
    return teacher + student_forward + head + student_backward + recomputed + optimizer +
           communication;
  }
};

// What crosses ranks in a step, for one purpose.
struct Traffic {
  std::string what;
  int group = 1;               // ranks that share it
  bool crosses_hosts = false;  // whether they lie on several
  double rank_bytes = 0.0;     // that one rank receives
  double host_bytes = 0.0;     // that the ranks of one host receive from other hosts
  double seconds = 0.0;
};

struct StageTime {
  StepSeconds step;
  std::vector<Traffic> traffic;

  // Of all the stage's steps.
  double days(std::int64_t steps) const;
  double gpu_hours(std::int64_t steps, int ranks) const;
};

// Of one stage of a plan. Rings (gathers and sums over a group) cross from host to host once, so
// that a host's GPUs share what enters it; what goes from rank to rank crosses where the two lie on
// different hosts.
StageTime predict_stage(const PlanInputs& inputs,
                        const Plan& plan,
                        const PlannedStage& stage,
                        const MachineAssumptions& machine);

}  // namespace bifocal
