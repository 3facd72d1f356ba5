// Tables of bytes and seconds.
#include "cli/plan_times.h"

#include <fmt/format.h>

#include "core/error.h"
#include "core/log.h"

namespace bifocal {

namespace {

using Json = nlohmann::ordered_json;

MachineAssumptions machine_of(const TimeOptions& options) {
  MachineAssumptions machine{.gpu = *gpu_speed(options.gpu.empty() ? "h200" : options.gpu),
                             .document_tokens = options.document_tokens};
  if (options.link > 0.0) {
    machine.gpu.link = 1e9 * options.link;
  }
  if (options.network > 0.0) {
    machine.network = 1e9 * options.network;
  }
  return machine;
}

std::vector<std::pair<const char*, double>> parts_of(const StepSeconds& step) {
  return {{"teacher", step.teacher},
          {"student forward", step.student_forward},
          {"head and loss", step.head},
          {"student backward", step.student_backward},
          {"computed again", step.recomputed},
          {"optimiser", step.optimizer},
          {"communication", step.communication}};
}

}  // namespace

PlanTimes::PlanTimes(const PlanInputs& inputs, const Plan& plan, const TimeOptions& options)
    : plan_(&plan), has_times_(!options.gpu.empty()), machine_(machine_of(options)) {
  const RunConfig& config = inputs.config;
  const bool is_measured =
      config.run.device == "cuda" && (config.run.dtype == "auto" || config.run.dtype == "bfloat16");
  BIFOCAL_REQUIRE(
      !has_times_ || is_measured,
      "[plan] --gpu knows times of bfloat16 on GPUs, but run.device is {} and run.dtype "
      "{}: set run.device = \"cuda\" and leave run.dtype at auto, or --gpu out",
      config.run.device,
      config.run.dtype);
  for (const PlannedStage& stage : plan.stages) {
    stages_.push_back(predict_stage(inputs, plan, stage, machine_));
  }
}

void PlanTimes::print() const {
  for (std::size_t stage = 0; stage < stages_.size(); ++stage) {
    if (!stages_[stage].traffic.empty()) {
      print_traffic(stage);
    }
  }
  if (!has_times_) {
    fmt::print("\nFor step times, days and GPU-hours name the GPU: --gpu h200, h100 or a100\n");
    return;
  }
  double days = 0.0;
  double hours = 0.0;
  for (std::size_t stage = 0; stage < stages_.size(); ++stage) {
    print_step(stage);
    days += stages_[stage].days(plan_->stages[stage].steps);
    hours += stages_[stage].gpu_hours(plan_->stages[stage].steps, plan_->ranks);
  }
  fmt::print("\nIn all {:.2f} days on {} GPU(s), {:.0f} GPU-hours.\n", days, plan_->ranks, hours);
  print_assumptions();
}

void PlanTimes::print_traffic(std::size_t stage) const {
  fmt::print("\n{:<24}{:>8}{:>16}{:>22}{}\n",
             fmt::format("links in a step, {}", name_of(plan_->stages[stage].kind)),
             "ranks",
             "a rank gets",
             "a host gets of others",
             has_times_ ? fmt::format("{:>12}", "seconds") : "");
  for (const Traffic& traffic : stages_[stage].traffic) {
    fmt::print("  {:<22}{:>8}{:>16}{:>22}{}\n",
               traffic.what,
               traffic.group,
               format_bytes(traffic.rank_bytes),
               traffic.crosses_hosts ? format_bytes(traffic.host_bytes) : "-",
               has_times_ ? fmt::format("{:>12.4f}", traffic.seconds) : "");
  }
}

void PlanTimes::print_step(std::size_t stage) const {
  const PlannedStage& planned = plan_->stages[stage];
  const StageTime& time = stages_[stage];
  const double step = time.step.total();
  fmt::print("\n{:<24}{:>10.3f} s = {:.0f} tokens/s\n",
             fmt::format("a step of {}", name_of(planned.kind)),
             step,
             static_cast<double>(planned.tokens) / static_cast<double>(planned.steps) / step);
  for (const auto& [name, seconds] : parts_of(time.step)) {
    if (seconds > 0.0) {
      fmt::print("  {:<22}{:>10.3f} s{:>7.1f} %\n", name, seconds, 100.0 * seconds / step);
    }
  }
  fmt::print("  {:<22}{:>10.2f} days, {:.0f} GPU-hours\n",
             fmt::format("{} steps", format_count(planned.steps)),
             time.days(planned.steps),
             time.gpu_hours(planned.steps, plan_->ranks));
}

void PlanTimes::print_assumptions() const {
  fmt::print("Assumed:\n  {} speeds: {}\n", machine_.gpu.name, machine_.gpu.source);
  fmt::print("  a GPU receives {:.0f} GB/s from those of its host{}\n",
             1e-9 * machine_.gpu.link,
             plan_->ranks > plan_->ranks_per_node
                 ? fmt::format(", {:.0f} GB/s from other hosts", 1e-9 * machine_.network)
                 : "");
  fmt::print("  {}; no rank waits for another's longer row\n",
             machine_.document_tokens == 0
                 ? std::string("rows are one document each, the teacher's dearest case")
                 : fmt::format("documents have {} tokens", format_count(machine_.document_tokens)));
  fmt::print(
      "  no traffic hides behind kernels; reading, validations and checkpoints take no time\n");
}

Json PlanTimes::json() const {
  Json json{{"assumptions",
             {{"gpu", has_times_ ? Json(machine_.gpu.name) : Json()},
              {"source", machine_.gpu.source},
              {"link_bytes_per_second", machine_.gpu.link},
              {"network_bytes_per_second", machine_.network},
              {"document_tokens", machine_.document_tokens}}},
            {"stages", Json::array()}};
  for (std::size_t index = 0; index < stages_.size(); ++index) {
    const PlannedStage& planned = plan_->stages[index];
    const StageTime& time = stages_[index];
    Json stage{{"name", name_of(planned.kind)}, {"traffic", Json::array()}};
    for (const Traffic& traffic : time.traffic) {
      Json one{{"what", traffic.what},
               {"ranks", traffic.group},
               {"bytes_a_rank", traffic.rank_bytes},
               {"bytes_a_host", traffic.host_bytes}};
      if (has_times_) {
        one["seconds"] = traffic.seconds;
      }
      stage["traffic"].push_back(one);
    }
    if (has_times_) {
      stage["step_seconds"] = time.step.total();
      for (const auto& [name, seconds] : parts_of(time.step)) {
        stage["step_seconds_by_part"][name] = seconds;
      }
      stage["days"] = time.days(planned.steps);
      stage["gpu_hours"] = time.gpu_hours(planned.steps, plan_->ranks);
    }
    json["stages"].push_back(stage);
  }
  return json;
}

}  // namespace bifocal
