// What ops cost on paper: the operations of their matrix products (a multiply and an add are two)
// and the bytes that must cross memory once: every input read, every output written. Only types and
// shapes of the tensors are read, so they may be views of nothing. A measured time over the larger
// of the two floors is what an implementation leaves on the table.
#pragma once

#include <cstdint>
#include <span>

#include "ops/adamw.h"
#include "ops/bifocal_gate.h"
#include "ops/distill_loss.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/feature_map.h"
#include "ops/linear.h"
#include "ops/mlstm.h"
#include "ops/reduce.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"
#include "ops/sliding_attention.h"
#include "ops/swiglu.h"

namespace bifocal {

struct OpCost {
  double flop = 0.0;
  double bytes = 0.0;

  OpCost& operator+=(const OpCost& other) {
    flop += other.flop;
    bytes += other.bytes;
    return *this;
  }
};

inline OpCost operator+(OpCost a, const OpCost& b) {
  return a += b;
}

// What a device reaches on large problems, not its data sheet.
struct DeviceRates {
  double flop = 790e12;  // per second; products of bf16 matrices on an H200
  double bytes = 4.3e12;
};

// No implementation is faster: the larger of the times that products and bytes need.
double floor_seconds(const OpCost& cost, const DeviceRates& rates);

OpCost cost(const LinearForward& op);
OpCost cost(const LinearBackwardInput& op);
OpCost cost(const LinearBackwardWeight& op);

// (query, key) pairs of causal attention over packed documents of these lengths. window: keys that
// a query sees at most, itself included; 0: all of its document.
double visible_pairs(std::span<const std::int64_t> documents, std::int64_t window);

// The same from AttentionInputs::key_begin on the host, of `keys` keys; pinned keys not counted.
double visible_pairs(std::span<const std::int32_t> key_begin, std::int64_t keys);

// Two products of a pair and head forward; five backward, where logits are formed again.
OpCost cost(const SlidingAttentionForward& op, double pairs);
OpCost cost(const SlidingAttentionBackward& op, double pairs);

// By chunks of `chunk` tokens, whose products inside count by their causal half; the states between
// chunks are written and read once. Backward reads no h: what it adds is one number a head.
OpCost cost(const MlstmForward& op, std::int64_t chunk);
OpCost cost(const MlstmBackward& op, std::int64_t chunk);

OpCost cost(const FeatureMapForward& op);
OpCost cost(const FeatureMapBackward& op);

// Bytes alone.
OpCost cost(const DistillLoss& op);
OpCost cost(const AlignLoss& op);
OpCost cost(const AdamW& op);
OpCost cost(const SumOfSquares& op);
OpCost cost(const RmsNormForward& op);
OpCost cost(const RmsNormBackward& op);
OpCost cost(const SwigluForward& op);
OpCost cost(const SwigluBackward& op);
OpCost cost(const RopeRotate& op);
OpCost cost(const BifocalGateForward& op);
OpCost cost(const BifocalGateBackward& op);
OpCost cost(const EmbeddingForward& op);
OpCost cost(const EmbeddingBackward& op);
OpCost cost(const Add& op);
OpCost cost(const Cast& op);

}  // namespace bifocal
