// What a run measures on held-out rows while it trains.
#pragma once

#include <cstdint>
#include <vector>

#include "evaluate/divergence.h"

namespace bifocal {

// How much each layer's far branch speaks, over all tokens but padding. NaN in layers without what
// is measured; both empty where no layer has a far branch.
struct BranchShares {
  std::vector<double> gate_means;  // [layers] mean of o = sigmoid(gate) over tokens and heads
  // [layers] what zeroing the far branch alone would change of the mixed heads y: |y - y0| / |y|,
  // norms over tokens, heads and channels. With a gate y - y0 = o far, with a sum it is far.
  std::vector<double> far_shares;
};

struct Validation {
  std::int64_t rows = 0;
  Divergence divergence;
  BranchShares branches;
};

// Sums of branches, row after row, as the student's forward passes go by.
class BranchObserver {
 public:
  BranchObserver(Context context, const ModelConfig& config);

  // Hand it to Decoder::forward() of a student with this config. tokens: the row's first ones that
  // count.
  Decoder::Observer observe(std::int64_t tokens);

  // Collective over the group whose ranks saw the rows.
  BranchShares shares(Communicator& group);

 private:
  struct Layer {
    double gate = 0.0, gates = 0.0;  // sum of o, and how many
    double far = 0.0, mixed = 0.0;   // sums of squares
  };

  void add(Layer& layer, const Block::Observation& seen, std::int64_t tokens);
  double squares(const ConstTensorView& x);

  Context context_;
  std::vector<MixerSettings> mixers_;
  std::vector<Layer> layers_;
};

// Measures a student beside its teacher. Collective over the evaluator's world.
Validation validate(Context context,
                    Evaluator& evaluator,
                    Communicator& world,
                    Decoder& student,
                    Decoder& teacher,
                    const EvaluationRows& rows,
                    std::int64_t count);

}  // namespace bifocal
