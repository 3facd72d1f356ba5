// The weights of a model that lies whole on this rank, as generation reads them.
#pragma once

#include <vector>

#include "model/layer_weights.h"
#include "model/weights.h"

namespace bifocal {

// Matrices are views in the type they are stored in. Vectors (norms, biases, sinks) are in the
// compute type: copies where they are stored in another one.
class ResidentWeights {
 public:
  // Throws Error where the weights are spread over ranks. `weights` must outlive this.
  ResidentWeights(Context context, const ModelConfig& config, const Weights& weights);

  const LayerWeights& layer(std::int64_t index) const {
    return layers_[static_cast<std::size_t>(index)];
  }

  const ConstTensorView& embedding() const { return embedding_; }  // [vocabulary, D]

  const ConstTensorView& head() const { return head_; }  // [vocabulary, D]

  const ConstTensorView& final_norm() const { return final_norm_; }  // [D]

 private:
  void to_compute_type(Context& context, ConstTensorView& vector);

  std::vector<LayerWeights> layers_;
  ConstTensorView embedding_, head_, final_norm_;
  std::vector<Tensor> copies_;
};

}  // namespace bifocal
