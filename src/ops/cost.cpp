// Counts.
#include "ops/cost.h"

#include <algorithm>
#include <initializer_list>

namespace bifocal {

namespace {

double bytes_of(std::initializer_list<ConstTensorView> tensors) {
  double bytes = 0.0;
  for (const ConstTensorView& tensor : tensors) {
    bytes += static_cast<double>(tensor.bytes());
  }
  return bytes;
}

double number(std::int64_t count) {
  return static_cast<double>(count);
}

// Rows of `wide` by all of a matrix.
double product_flop(const ConstTensorView& rows, std::int64_t out) {
  return 2.0 * number(rows.size()) * number(out);
}

double bytes_of(const AttentionInputs& in) {
  return bytes_of({in.q, in.k, in.v, in.key_begin, in.sink}) +
         bytes_of({in.pinned_k, in.pinned_v, in.pinned_begin, in.pinned_end});
}

struct MlstmCounts {
  double tokens, heads, states, dim, chunk;

  // Rows of all query heads, or of all states, by a state: [dim, dim].
  double of_heads() const { return 2.0 * tokens * heads * dim * dim; }

  double of_states() const { return 2.0 * tokens * states * dim * dim; }

  // One causal product inside the chunks.
  double inside() const { return tokens * chunk * heads * dim; }

  // Float32 C and n at the end of every chunk.
  double state_bytes() const { return tokens / chunk * states * dim * (dim + 1.0) * 4.0; }
};

MlstmCounts counts_of(const MlstmInputs& in, std::int64_t chunk) {
  return {.tokens = number(in.q.shape[0]),
          .heads = number(in.q.shape[1]),
          .states = number(in.k.shape[1]),
          .dim = number(in.q.shape[2]),
          .chunk = number(chunk)};
}

double gate_bytes(const MlstmInputs& in) {
  return bytes_of({in.i_gate, in.f_gate, in.starts});
}

}  // namespace

double floor_seconds(const OpCost& cost, const DeviceRates& rates) {
  return std::max(cost.flop / rates.flop, cost.bytes / rates.bytes);
}

OpCost cost(const LinearForward& op) {
  return {product_flop(op.x, op.y.shape[1]), bytes_of({op.y, op.x, op.weight, op.bias})};
}

OpCost cost(const LinearBackwardInput& op) {
  const double again = op.accumulate ? number(static_cast<std::int64_t>(op.d_x.bytes())) : 0.0;
  return {product_flop(op.d_y, op.d_x.shape[1]), bytes_of({op.d_x, op.d_y, op.weight}) + again};
}

OpCost cost(const LinearBackwardWeight& op) {
  return {product_flop(op.d_y, op.x.shape[1]),
          bytes_of({op.d_weight, op.d_weight, op.d_y, op.x, op.d_bias, op.d_bias})};
}

double visible_pairs(std::span<const std::int64_t> documents, std::int64_t window) {
  double pairs = 0.0;
  for (const std::int64_t tokens : documents) {
    const double seen = number(window == 0 ? tokens : std::min(window, tokens));
    pairs += number(tokens) * seen - seen * (seen - 1.0) / 2.0;
  }
  return pairs;
}

double visible_pairs(std::span<const std::int32_t> key_begin, std::int64_t keys) {
  const auto tokens = static_cast<std::int64_t>(key_begin.size());
  double pairs = 0.0;
  for (std::int64_t token = 0; token < tokens; ++token) {
    pairs += number(keys - tokens + token + 1 - key_begin[static_cast<std::size_t>(token)]);
  }
  return pairs;
}

OpCost cost(const SlidingAttentionForward& op, double pairs) {
  const Shape& q = op.inputs.q.shape;
  return {4.0 * pairs * number(q[1] * q[2]), bytes_of(op.inputs) + bytes_of({op.out, op.lse})};
}

OpCost cost(const SlidingAttentionBackward& op, double pairs) {
  const Shape& q = op.inputs.q.shape;
  return {10.0 * pairs * number(q[1] * q[2]),
          bytes_of(op.inputs) + bytes_of({op.d_q, op.d_k, op.d_v, op.d_sink, op.d_pinned_k}) +
              bytes_of({op.d_pinned_v, op.d_out, op.out, op.lse})};
}

OpCost cost(const MlstmForward& op, std::int64_t chunk) {
  const MlstmInputs& in = op.inputs;
  const MlstmCounts n = counts_of(in, chunk);
  // q C; q k^T and its product with v; k^T v.
  return {n.of_heads() + 2.0 * n.inside() + n.of_states(),
          bytes_of({op.h, in.q, in.k, in.v}) + gate_bytes(in) + 2.0 * n.state_bytes()};
}

OpCost cost(const MlstmBackward& op, std::int64_t chunk) {
  const MlstmInputs& in = op.inputs;
  const MlstmCounts n = counts_of(in, chunk);
  // d_h C^T for d_q and q^T d_h for d_C; v d_C^T, k d_C and k^T v again; inside: q k^T again,
  // d_h v^T, and the products with it for d_q, d_k and d_v.
  return {2.0 * n.of_heads() + 3.0 * n.of_states() + 5.0 * n.inside(),
          bytes_of({op.d_q, op.d_k, op.d_v, op.d_h, in.q, in.k, in.v}) + 2.0 * gate_bytes(in) +
              4.0 * n.state_bytes()};
}

OpCost cost(const FeatureMapForward& op) {
  return {product_flop(op.y, op.y.shape[2]), bytes_of({op.y, op.x, op.weight})};
}

OpCost cost(const FeatureMapBackward& op) {
  return {2.0 * product_flop(op.d_y, op.d_y.shape[2]),
          bytes_of({op.d_x, op.d_x, op.d_weight, op.d_weight, op.d_y, op.y, op.x, op.weight})};
}

OpCost cost(const DistillLoss& op) {
  return {0.0,
          bytes_of({op.d_student, op.kl, op.ce, op.agree, op.student, op.teacher, op.next}) +
              bytes_of({op.kl_weight, op.ce_weight})};
}

OpCost cost(const AlignLoss& op) {
  return {0.0, bytes_of({op.d_student, op.student, op.teacher, op.keep})};
}

OpCost cost(const AdamW& op) {
  return {0.0,
          2.0 * bytes_of({op.parameter, op.first, op.second}) + bytes_of({op.gradient, op.copy})};
}

OpCost cost(const SumOfSquares& op) {
  return {0.0, bytes_of({op.x})};
}

OpCost cost(const RmsNormForward& op) {
  return {0.0, bytes_of({op.y, op.x, op.weight})};
}

OpCost cost(const RmsNormBackward& op) {
  const double again = op.accumulate ? bytes_of({op.d_x}) : 0.0;
  return {0.0, bytes_of({op.d_x, op.d_weight, op.d_weight, op.d_y, op.x, op.weight}) + again};
}

OpCost cost(const SwigluForward& op) {
  return {0.0, bytes_of({op.y, op.gate, op.up})};
}

OpCost cost(const SwigluBackward& op) {
  return {0.0, bytes_of({op.d_gate, op.d_up, op.d_y, op.gate, op.up})};
}

OpCost cost(const RopeRotate& op) {
  return {0.0, bytes_of({op.x, op.x, op.cos, op.sin})};
}

OpCost cost(const BifocalGateForward& op) {
  return {0.0, bytes_of({op.y, op.far, op.near, op.gate})};
}

OpCost cost(const BifocalGateBackward& op) {
  return {0.0, bytes_of({op.d_far, op.d_near, op.d_gate, op.d_y, op.far, op.near, op.gate})};
}

// A row of the table for each token, though some repeat.
OpCost cost(const EmbeddingForward& op) {
  return {0.0, bytes_of({op.y, op.y, op.ids})};
}

OpCost cost(const EmbeddingBackward& op) {
  const double rows = number(op.d_y.size()) * static_cast<double>(size_of(op.d_table.dtype));
  return {0.0, bytes_of({op.d_y, op.ids}) + 2.0 * rows};
}

OpCost cost(const Add& op) {
  return {0.0, bytes_of({op.y, op.a, op.b})};
}

OpCost cost(const Cast& op) {
  return {0.0, bytes_of({op.y, op.x})};
}

}  // namespace bifocal
