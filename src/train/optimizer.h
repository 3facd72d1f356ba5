// AdamW over this rank's parts, with gradient clipping.
#pragma once

#include <functional>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "config/run_config.h"
#include "distill/stage.h"
#include "model/gradients.h"
#include "model/weights.h"

namespace bifocal {

class Optimizer {
 public:
  Optimizer(Context context, Weights& weights, const RunConfig::Optimizer& settings);

  struct Step {
    std::function<bool(const Parameter&)> trains;
    std::function<double(const Parameter&)> rate;
    std::function<bool(const Parameter&)> decays;
    ClipScope clip_scope = ClipScope::all_parameters;
    double clip = 1.0;                 // largest norm; 0 for none
    std::vector<double> unit_factors;  // StepResult::unit_factors
    std::int64_t number = 1;           // of this stage, from 1
  };

  // Updates the parts of the trained parameters and shares them. Returns the gradient's norm over
  // trained parameters before clipping (each_unit: the root of the sum of squares over units).
  // Every other parameter keeps its bits. Collective. Throws Error, before anything has changed,
  // when the norm is not finite.
  double update(const Step& step, Gradients& gradients);

  // Moments back to zero: a new stage.
  void reset();

  Weights& weights() const { return *weights_; }

  // Weights and moments as named ranges, for checkpoints.
  std::vector<ShardedTensor> checkpoint_tensors() const;

 private:
  void zero_untrained(const Step& step, Gradients& gradients) const;

  Context context_;
  Weights* weights_;
  RunConfig::Optimizer settings_;
  std::vector<Tensor> first_, second_;
};

}  // namespace bifocal
