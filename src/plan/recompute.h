// What the backward pass computes again instead of keeping it.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace bifocal {

// From least to most. Each level keeps less of a layer than the one before (docs/parallelism.md has
// the bytes); none changes a bit of a gradient.
enum class Recompute : std::uint8_t {
  none,   // nothing
  light,  // no products over the model's width: norms, rope, features, mixed heads, SwiGLU
  mlp,    // also the MLP's gate and up projections
  mixer,  // also the mixer whole; kept are the layer's input and what stands between its halves
  block   // everything but the input and the mLSTM state that entered the shard
};

std::string_view name_of(Recompute level);

// The level of a name that options.h allows.
Recompute recompute_named(std::string_view name);

// All layers compute `level` again, but the last `richer_layers` keep as much as the level before
// it. They are the last ones because the backward pass frees them first.
struct RecomputePlan {
  RecomputePlan() = default;

  RecomputePlan(Recompute level,  // NOLINT(google-explicit-constructor): a plan like any other
                std::int64_t richer_layers = 0)
      : level(level), richer_layers(richer_layers) {}

  Recompute of_layer(std::int64_t layer, std::int64_t layers) const;

  bool operator==(const RecomputePlan&) const = default;

  Recompute level = Recompute::none;
  std::int64_t richer_layers = 0;
};

// Every plan for a model of so many layers, from the one that keeps most to the one that keeps
// least.
std::vector<RecomputePlan> recompute_plans(std::int64_t layers);

}  // namespace bifocal
