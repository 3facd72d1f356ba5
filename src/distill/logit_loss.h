// Stage 2's loss over one shard of a row, logits made, compared and differentiated in chunks of
// tokens.
#pragma once

#include "model/decoder.h"
#include "model/head.h"
#include "model/row_shard.h"

namespace bifocal {

// loss = kl_share temperature^2 KL(teacher || student at the temperature) + ce_share CE, each a
// mean over its own global count.
struct LogitLossOptions {
  double temperature = 1.0;
  double ce_share = 0.0;     // s; the KL has 1 - s
  std::int64_t chunk = 256;  // tokens whose logits exist at once
};

// Sums over this shard's counted tokens.
struct LogitLossSums {
  double kl = 0.0;
  double ce = 0.0;
};

// Factors of each counted token's gradient: shares over global counts, 0 where a count is 0.
struct LogitLossWeights {
  double kl = 0.0;
  double ce = 0.0;
};

LogitLossWeights logit_loss_weights(const LogitLossOptions& options,
                                    const RowCounts& global_counts);

// hidden [tokens, D] of the student, teacher_hidden [tokens, D_teacher]. Writes d_hidden [tokens,
// D] and adds the head's gradient to its open unit. Collective where weights are sharded.
struct LogitLoss {
  Context context;
  Decoder& student;
  Decoder* teacher;  // none: cross-entropy alone
  LogitLossOptions options;

  LogitLossSums operator()(const RowShard& shard,
                           const ConstTensorView& hidden,
                           const ConstTensorView& teacher_hidden,
                           const LogitLossWeights& weights,
                           const TensorView& d_hidden,
                           Gradients& gradients) const;
};

}  // namespace bifocal
