// The part of `bifocal plan` that tells traffic and times.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "plan/step_time.h"

namespace bifocal {

// What the command line says of the machine. Speeds in GB/s; 0: the GPU's own, or the default.
struct TimeOptions {
  std::string gpu;  // empty: bytes alone, no times
  double link = 0.0;
  double network = 0.0;
  std::int64_t document_tokens = 0;
};

// The times of a plan's stages, in their order.
class PlanTimes {
 public:
  PlanTimes(const PlanInputs& inputs, const Plan& plan, const TimeOptions& options);

  void print() const;
  // {"assumptions": ..., "stages": [...]}
  nlohmann::ordered_json json() const;

 private:
  void print_traffic(std::size_t stage) const;
  void print_step(std::size_t stage) const;
  void print_assumptions() const;

  const Plan* plan_;
  bool has_times_;
  MachineAssumptions machine_;
  std::vector<StageTime> stages_;
};

}  // namespace bifocal
