// The output head: logits of a few tokens at a time, never of a whole row.
#pragma once

#include "model/gradients.h"
#include "model/weights.h"

namespace bifocal {

// Holds the head's weight (the embedding's where tied) while it lives. Collective where weights are
// sharded.
class Head {
 public:
  Head(Context context, const ModelConfig& config, Weights& weights);
  ~Head();
  Head(const Head&) = delete;
  Head& operator=(const Head&) = delete;

  // The unit that holds the weight.
  std::int64_t unit() const { return parameter_->unit; }

  // logits [tokens, vocabulary] of hidden [tokens, D].
  void logits(const ConstTensorView& hidden, const TensorView& logits) const;

  // d_hidden = d_logits W, and W's gradient += d_logits^T hidden in its open unit.
  void backward(const ConstTensorView& d_logits,
                const ConstTensorView& hidden,
                const TensorView& d_hidden,
                Gradients& gradients) const;

 private:
  Context context_;
  Weights* weights_;
  const Parameter* parameter_;
  ConstTensorView weight_;  // [vocabulary, D]
};

}  // namespace bifocal
