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

// Factors of each counted token's gradient: shares over global counts, 0 where a count is 0.
struct LogitLossWeights {
  double kl = 0.0;
  double ce = 0.0;
};

LogitLossWeights logit_loss_weights(const LogitLossOptions& options,
                                    const RowCounts& global_counts);

// What the loss of one shard reads and writes. All views lie on the device.
struct LogitLossRow {
  const RowShard& shard;
  const Row& row;                  // the whole row, on the host
  ConstTensorView hidden;          // [tokens, D] of the student
  ConstTensorView teacher_hidden;  // [tokens, D_teacher]
  TensorView d_hidden;             // [tokens, D], overwritten
  TensorView sums;                 // [2] f64: KL and CE over counted tokens, added to
};

// Adds the head's gradient to its open unit. Queues work alone: nothing waits for the device.
// Collective where weights are sharded.
struct LogitLoss {
  Context context;
  Decoder& student;
  Decoder* teacher;  // none: cross-entropy alone
  LogitLossOptions options;

  void operator()(const LogitLossRow& row,
                  const LogitLossWeights& weights,
                  Gradients& gradients) const;
};

}  // namespace bifocal
