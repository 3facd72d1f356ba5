// What a stage will hold, asked before anything is allocated.
#include "cli/stage_forecast.h"

#include <algorithm>

#include <fmt/format.h>

namespace bifocal {

namespace {

// What every rank has at least: all must compute the same again, for it may communicate.
// Collective.
double least_free_gib(const Session& session, Communicator& world) {
  std::size_t least = session.free_bytes();
  for (const std::string& text : gather_texts(world, std::to_string(least))) {
    least = std::min<std::size_t>(least, std::stoull(text));
  }
  return static_cast<double>(least) / (1024.0 * 1024.0 * 1024.0);
}

}  // namespace

StageMemory forecast_stage(const RunConfig& config,
                           const Session& session,
                           const Mesh& mesh,
                           const ModelConfig& student,
                           const ModelConfig* teacher) {
  PlanInputs inputs{.config = config,
                    .student = student,
                    .teacher_storage = compute_type(config),
                    .ranks = mesh.world().size(),
                    .ranks_per_node = mesh.node().size()};
  if (config.memory.limit_gib == 0.0) {
    inputs.config.memory.limit_gib = least_free_gib(session, mesh.world());
  }
  if (teacher != nullptr) {
    inputs.teacher = *teacher;
  }
  return plan_memory(inputs, teacher != nullptr ? StageKind::distill : StageKind::pretrain);
}

std::string describe(const StageMemory& memory) {
  std::string text = fmt::format("memory forecast: recompute {}", name_of(memory.recompute.level));
  if (memory.recompute.richer_layers > 0) {
    text += fmt::format(", the last {} layers one level less", memory.recompute.richer_layers);
  }
  text += fmt::format(
      "; peak {} on rank {}:", format_bytes(static_cast<double>(memory.peak.total)), memory.rank);
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
