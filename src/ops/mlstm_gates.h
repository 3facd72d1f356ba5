// The mLSTM's scalars: sizes, documents cut into chunks, log decays and the stabiliser m.
#pragma once

#include <vector>

#include "ops/mlstm.h"

namespace bifocal {

// Tokens in a chunk at most: long enough that products dominate, short enough that the wasted half
// of the causal ones stays small.
inline constexpr std::int64_t kMlstmChunkTokens = 64;

// Added to the normaliser; keeps 0/0 away and nothing else.
inline constexpr double kMlstmTiny = 1e-30;

struct MlstmSizes {
  std::int64_t tokens, heads, states, v_heads, head_dim;

  // Query heads that read one state.
  std::int64_t readers() const { return heads / states; }

  // States that hold one value head.
  std::int64_t holders() const { return states / v_heads; }
};

// Tokens [begin, end) of one document. Chunks begin anew at every document, so no product ever
// mixes two documents and no mask is needed between them.
struct MlstmChunk {
  std::int64_t begin, end;
  bool opens_document;
};

// All [states, tokens]. The read does not depend on m as long as m bounds the exponents, so m comes
// from the gates alone, before any product.
struct MlstmGates {
  std::vector<double> input;      // i
  std::vector<double> decay_sum;  // sum of logsig(f) from the chunk's first token to this one
  std::vector<double> m;
  std::vector<double> initial_m;  // [states], -inf where the state is empty
};

struct MlstmProblem {
  MlstmInputs inputs;
  MlstmSizes sizes;
  std::vector<MlstmChunk> chunks;
  MlstmGates gates;

  // m of a state before the first token of the chunk: -inf where the chunk opens a document.
  double m_before(const MlstmChunk& chunk, std::int64_t state) const;

  // m of a state after the last token.
  double m_after(std::int64_t state) const;
};

// Where inputs.q is left out, every state has one reader.
MlstmSizes mlstm_sizes(const MlstmInputs& inputs);

MlstmProblem prepare_mlstm(const MlstmInputs& inputs);

// Sum of logsig(f) over a shard for each state; -inf where a document starts inside.
std::vector<double> mlstm_total_decay(const MlstmInputs& inputs);

// exp(log_weight - m), 0 at the scale of an empty state (m = -inf).
double weight_at_scale(double log_weight, double m);

}  // namespace bifocal
