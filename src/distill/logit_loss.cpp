// Chunked losses over the vocabulary.
#include "distill/logit_loss.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "ops/distill_loss.h"

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

LogitLossSums LogitLoss::operator()(const RowShard& shard,
                                    const ConstTensorView& hidden,
                                    const ConstTensorView& teacher_hidden,
                                    const LogitLossWeights& weights,
                                    const TensorView& d_hidden,
                                    Gradients& gradients) const {
  const Head head(context, student.config(), student.weights());
  std::optional<Head> teacher_head;
  if (teacher != nullptr) {
    teacher_head.emplace(context, teacher->config(), teacher->weights());
  }
  const std::int64_t tokens = hidden.shape[0];
  const std::int64_t vocabulary = student.config().vocabulary;
  const std::int64_t chunk = std::min(options.chunk, std::max<std::int64_t>(tokens, 1));
  const Tensor logits = context.memory.empty(Region::loss, context.dtype, {chunk, vocabulary});
  const Tensor teacher_logits = context.memory.empty(
      Region::loss, context.dtype, {teacher != nullptr ? chunk : 0, vocabulary});
  gradients.open(head.unit());  // also where no token lies here: every rank closes the same units
  const std::uint8_t* keep = shard.keep.as<std::uint8_t>();
  const std::int32_t* next = shard.next.as<std::int32_t>();
  LogitLossSums sums;
  for (std::int64_t begin = 0; begin < tokens; begin += chunk) {
    const std::int64_t end = std::min(tokens, begin + chunk);
    const std::int64_t count = end - begin;
    std::vector<double> kl(static_cast<std::size_t>(count));
    std::vector<double> ce(kl.size());
    std::vector<double> kl_weight(kl.size());
    std::vector<double> ce_weight(kl.size());
    for (std::int64_t row = 0; row < count; ++row) {
      const auto index = static_cast<std::size_t>(row);
      const bool kept = keep[begin + row] != 0;
      kl_weight[index] = kept ? weights.kl : 0.0;
      ce_weight[index] = kept && next[begin + row] >= 0 ? weights.ce : 0.0;
    }
    const auto view = [&](std::vector<double>& values) {
      return TensorView{values.data(), DType::f64, {count}};
    };
    const ConstTensorView student_hidden = hidden.rows(begin, end);
    const TensorView student_logits = logits.rows(0, count);
    head.logits(student_hidden, student_logits);
    DistillLoss op{.d_student = student_logits,
                   .ce = view(ce),
                   .student = student_logits,
                   .next = shard.next.rows(begin, end),
                   .ce_weight = view(ce_weight),
                   .temperature = options.temperature};
    if (teacher_head) {
      teacher_head->logits(teacher_hidden.rows(begin, end), teacher_logits.rows(0, count));
      op.kl = view(kl);
      op.teacher = teacher_logits.rows(0, count);
      op.kl_weight = view(kl_weight);
    }
    run(context.stream, op);
    for (std::int64_t row = 0; row < count; ++row) {
      const auto index = static_cast<std::size_t>(row);
      if (keep[begin + row] == 0) {
        continue;
      }
      sums.kl += kl[index];
      if (next[begin + row] >= 0) {
        sums.ce += ce[index];
      }
    }
    head.backward(student_logits, student_hidden, d_hidden.rows(begin, end), gradients);
  }
  return sums;
}

}  // namespace bifocal
