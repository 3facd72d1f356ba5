// The output head.
#include "model/head.h"

#include "model/layer_weights.h"
#include "ops/linear.h"

namespace bifocal {

Head::Head(Context context, const ModelConfig& config, Weights& weights)
    : context_(context),
      weights_(&weights),
      parameter_(&weights.table().at(config.tied ? "model.embed_tokens.weight" : "lm_head.weight")),
      weight_(parameter_view(*parameter_, weights.acquire(parameter_->unit))) {}

Head::~Head() {
  weights_->release(parameter_->unit);
}

void Head::logits(const ConstTensorView& hidden, const TensorView& logits) const {
  run(context_.stream, LinearForward{.y = logits, .x = hidden, .weight = weight_});
}

void Head::backward(const ConstTensorView& d_logits,
                    const ConstTensorView& hidden,
                    const TensorView& d_hidden,
                    Gradients& gradients) const {
  const TensorView d_weight = parameter_view(*parameter_, gradients.open(parameter_->unit));
  run(context_.stream, LinearBackwardWeight{.d_weight = d_weight, .d_y = d_logits, .x = hidden});
  run(context_.stream, LinearBackwardInput{.d_x = d_hidden, .d_y = d_logits, .weight = weight_});
}

}  // namespace bifocal
