// Chunked losses over the vocabulary.
#include "distill/logit_loss.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "ops/distill_loss.h"
#include "ops/reduce.h"
#include "ops/transfer.h"

namespace bifocal {

LogitLossWeights logit_loss_weights(const LogitLossOptions& options,
                                    const RowCounts& global_counts) {
  LogitLossWeights weights;
  if (global_counts.kept > 0.0) {
    weights.kl = (1.0 - options.ce_share) / global_counts.kept;
  }
  if (global_counts.with_next > 0.0) {
    weights.ce = options.ce_share / global_counts.with_next;
  }
  return weights;
}

namespace {

// Per token of a shard, [tokens] f64.
struct TokenLosses {
  Tensor kl, ce;                // found
  Tensor kl_weight, ce_weight;  // given
};

TokenLosses make_token_losses(const Context& context,
                              const LogitLossRow& row,
                              const LogitLossWeights& weights) {
  const std::int64_t tokens = row.hidden.shape[0];
  const auto begin = static_cast<std::size_t>(row.shard.layout.begin());
  std::vector<double> kl(static_cast<std::size_t>(tokens));
  std::vector<double> ce(kl.size());
  for (std::size_t token = 0; token < kl.size(); ++token) {
    const bool kept = row.row.keep[begin + token] != 0;
    kl[token] = kept ? weights.kl : 0.0;
    ce[token] = kept && row.row.next[begin + token] >= 0 ? weights.ce : 0.0;
  }
  const auto empty = [&] { return context.memory.empty(Region::loss, DType::f64, {tokens}); };
  TokenLosses losses{empty(), empty(), empty(), empty()};
  const auto upload = [&](const Tensor& to, std::vector<double>& from) {
    run(context.stream, Upload{.y = to, .x = TensorView{from.data(), DType::f64, {tokens}}});
  };
  upload(losses.kl_weight, kl);
  upload(losses.ce_weight, ce);
  return losses;
}

}  // namespace

void LogitLoss::operator()(const LogitLossRow& row,
                           const LogitLossWeights& weights,
                           Gradients& gradients) const {
  const Head head(context, student.config(), student.weights());
  std::optional<Head> teacher_head;
  if (teacher != nullptr) {
    teacher_head.emplace(context, teacher->config(), teacher->weights());
  }
  const std::int64_t tokens = row.hidden.shape[0];
  const std::int64_t chunk = std::min(options.chunk, std::max<std::int64_t>(tokens, 1));
  const auto empty = [&](DType type, bool is_used) {
    return context.memory.empty(
        Region::loss, type, {is_used ? chunk : 0, student.config().vocabulary});
  };
  const DType wide = context.sum_type();
  const Tensor logits = empty(wide, true);
  const Tensor teacher_logits = empty(wide, teacher != nullptr);
  const Tensor narrow_gradient = empty(context.dtype, wide != context.dtype);
  const TokenLosses losses = make_token_losses(context, row, weights);
  gradients.open(head.unit());  // also where no token lies here: every rank closes the same units
  for (std::int64_t begin = 0; begin < tokens; begin += chunk) {
    const std::int64_t end = std::min(tokens, begin + chunk);
    const TensorView student_logits = logits.rows(0, end - begin);
    const TensorView d_logits =
        wide == context.dtype ? student_logits : narrow_gradient.rows(0, end - begin);
    head.logits(row.hidden.rows(begin, end), student_logits);
    DistillLoss op{.d_student = d_logits,
                   .ce = losses.ce.rows(begin, end),
                   .student = student_logits,
                   .next = row.shard.next.rows(begin, end),
                   .ce_weight = losses.ce_weight.rows(begin, end),
                   .temperature = options.temperature};
    if (teacher_head) {
      const TensorView of_teacher = teacher_logits.rows(0, end - begin);
      teacher_head->logits(row.teacher_hidden.rows(begin, end), of_teacher);
      op.kl = losses.kl.rows(begin, end);
      op.teacher = of_teacher;
      op.kl_weight = losses.kl_weight.rows(begin, end);
    }
    run(context.stream, op);
    head.backward(d_logits, row.hidden.rows(begin, end), row.d_hidden.rows(begin, end), gradients);
  }
  // A token without a successor has a cross-entropy of 0.
  run(context.stream, KeptSum{.sum = row.sums.rows(1, 2), .x = losses.ce, .keep = row.shard.keep});
  if (teacher != nullptr) {
    run(context.stream,
        KeptSum{.sum = row.sums.rows(0, 1), .x = losses.kl, .keep = row.shard.keep});
  }
}

}  // namespace bifocal
