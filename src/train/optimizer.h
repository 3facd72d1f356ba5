// AdamW over this rank's parts, with gradient clipping.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "config/run_config.h"
#include "distill/stage.h"
#include "model/gradients.h"
#include "model/host_images.h"
#include "model/weights.h"

namespace bifocal {

// Norm of a step's gradient: the root of the sum of squares over units, each times its factor.
double gradient_norm(const std::vector<double>& unit_squares,
                     const std::vector<double>& unit_factors);

class Optimizer {
 public:
  // settings.moments says where moments lie and in which type. host_memory: what the device reads
  // and writes on the host, for moments = "host" and for the copy that is kept; none: the context's
  // memory, which is the host's on a CPU, and for the copy any of the host's.
  Optimizer(Context context,
            Weights& weights,
            const RunConfig::Optimizer& settings,
            Memory* host_memory = nullptr);

  struct Step {
    std::function<bool(const Parameter&)> trains;
    std::function<double(const Parameter&)> rate;
    std::function<bool(const Parameter&)> decays;
    ClipScope clip_scope = ClipScope::all_parameters;
    double clip = 1.0;                 // largest norm; 0 for none
    std::vector<double> unit_factors;  // StepResult::unit_factors
    std::vector<double> unit_squares;  // StepResult::unit_squares
    std::int64_t number = 1;           // of this stage, from 1
  };

  // Updates the trained parameters of this rank and shares them. Returns the gradient's norm over
  // trained parameters before clipping (each_unit: the root of the sum of squares over units).
  // Every other parameter keeps its bits. Collective. Throws Error, before anything has changed,
  // when the norm is not finite.
  double update(const Step& step, const Gradients& gradients);

  // Moments back to zero: a new stage.
  void reset();

  Weights& weights() const { return *weights_; }

  // Master weights and moments as named ranges on the host, for checkpoints. save() calls use with
  // them as they are; load() lets fill write them and shares what was read. The views hold during
  // the call alone, or while a copy is kept.
  void save(const std::function<void(const std::vector<ShardedTensor>&)>& use) const;
  void load(const std::function<void(const std::vector<ShardedTensor>&)>& fill);

  // Takes memory on the host for a copy, which save() fills from then on: the views that it passes
  // hold, and later updates leave them alone, until the next save().
  void keep_copy();

  bool keeps_copy() const { return copy_ != nullptr; }

 private:
  // A range of a unit's part whose elements are updated alike, padding between parameters included.
  struct Range {
    std::int64_t begin = 0, end = 0;
    double rate = 0.0, decay = 0.0;
  };

  std::vector<Range> ranges_of(const Step& step, std::int64_t unit) const;
  void update_unit(const Step& step,
                   std::int64_t unit,
                   const TensorView& gradient,
                   double factor) const;
  std::vector<TensorView> state() const;  // masters, first and second moments
  std::vector<ShardedTensor> named(const std::vector<TensorView>& images) const;

  Context context_;
  Weights* weights_;
  RunConfig::Optimizer settings_;
  std::vector<Tensor> first_, second_;
  Memory* host_memory_;
  std::unique_ptr<HostImages> copy_;
};

}  // namespace bifocal
