// What the stages will hold, asked before anything is allocated.
#include "cli/stage_forecast.h"

#include <algorithm>

#include <fmt/format.h>

namespace bifocal {

namespace {

// Tests hold forecasts within 5 % of real peaks: what exceeds a limit by less may still fit.
constexpr double kSureShare = 0.95;

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

// What every rank has at least, 0 for no limit: all must compute the same again, for it may
// communicate. Collective.
double least_free_gib(const RunConfig& config, const Session& session, Communicator& world) {
  std::size_t least = session.free_bytes();
  for (const std::string& text : gather_texts(world, std::to_string(least))) {
    least = std::min<std::size_t>(least, std::stoull(text));
  }
  if (least == 0 && (config.run.device == "cuda" || config.memory.limit_gib > 0.0)) {
    least = 1;  // a full device is no device without limit
  }
  return static_cast<double>(least) / kGiB;
}

}  // namespace

std::vector<StageMemory> forecast_stages(PlanInputs inputs,
                                         const Session& session,
                                         const Mesh& mesh) {
  const double given = inputs.config.memory.limit_gib;
  const double free = least_free_gib(inputs.config, session, mesh.world());
  if (given == 0.0 || free < given) {
    inputs.limit_name = "the device's free memory";
  }
  inputs.config.memory.limit_gib = free;
  inputs.ranks = mesh.world().size();
  inputs.ranks_per_node = mesh.node().size();
  std::vector<StageMemory> stages = plan_stages(inputs);
  for (const StageMemory& stage : stages) {
    require_memory(inputs, stage, kSureShare);
  }
  return stages;
}

RecomputePlan last_recompute(const std::vector<StageMemory>& stages) {
  return stages.empty() ? RecomputePlan() : stages.back().recompute;
}

std::string describe(const StageMemory& memory) {
  std::string text = fmt::format("memory forecast of {}: ", name_of(memory.kind));
  if (memory.kind != StageKind::align) {  // which keeps one layer at a time
    text += fmt::format("recompute {}", name_of(memory.recompute.level));
    if (memory.recompute.richer_layers > 0) {
      text += fmt::format(", the last {} layers one level less", memory.recompute.richer_layers);
    }
    text += "; ";
  }
  text += fmt::format(
      "peak {} on rank {}:", format_bytes(static_cast<double>(memory.peak.total)), memory.rank);
  for (std::size_t index = 0; index < static_cast<std::size_t>(Region::count); ++index) {
    const auto region = static_cast<Region>(index);
    if (memory.peak.of(region) > 0) {
      text += fmt::format(
          " {} {},", name_of(region), format_bytes(static_cast<double>(memory.peak.of(region))));
    }
  }
  text.back() = '.';
  return text;
}

}  // namespace bifocal
