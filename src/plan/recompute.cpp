// Levels and their names.
#include "plan/recompute.h"

#include <array>

#include "core/error.h"

namespace bifocal {

namespace {

constexpr std::array<std::string_view, 5> kNames{"none", "light", "mlp", "mixer", "block"};

}  // namespace

std::string_view name_of(Recompute level) {
  return kNames.at(static_cast<std::size_t>(level));
}

Recompute recompute_named(std::string_view name) {
  for (std::size_t level = 0; level < kNames.size(); ++level) {
    if (kNames.at(level) == name) {
      return static_cast<Recompute>(level);
    }
  }
  fail("[config] memory.recompute: wanted none, light, mlp, mixer or block, got {}", name);
}

Recompute RecomputePlan::of_layer(std::int64_t layer, std::int64_t layers) const {
  const bool is_richer = level != Recompute::none && layer >= layers - richer_layers;
  return static_cast<Recompute>(static_cast<int>(level) - (is_richer ? 1 : 0));
}

std::vector<RecomputePlan> recompute_plans(std::int64_t layers) {
  std::vector<RecomputePlan> plans{Recompute::none};
  for (std::size_t level = 1; level < kNames.size(); ++level) {
    for (std::int64_t richer = layers - 1; richer >= 0; --richer) {
      plans.emplace_back(static_cast<Recompute>(level), richer);
    }
  }
  return plans;
}

}  // namespace bifocal
