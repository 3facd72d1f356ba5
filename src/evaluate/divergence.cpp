// KL, agreement and perplexity by position; reach.
#include "evaluate/divergence.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/error.h"
#include "core/random.h"
#include "model/head.h"
#include "model/row_shard.h"
#include "ops/distill_loss.h"
#include "ops/transfer.h"

namespace bifocal {

namespace {

constexpr std::size_t kBuckets = 32;

constexpr double DivergenceSums::*kFields[] = {&DivergenceSums::tokens,
                                               &DivergenceSums::kl,
                                               &DivergenceSums::agreements,
                                               &DivergenceSums::predicted,
                                               &DivergenceSums::student_ce,
                                               &DivergenceSums::teacher_ce};

// A result of the loss for each of some tokens, on the device.
Tensor per_token(Context& context, DType dtype, std::int64_t count) {
  return context.memory.empty(Region::loss, dtype, {count});
}

template <class T>
std::vector<T> to_host(Context& context, const Tensor& values) {
  std::vector<T> host(static_cast<std::size_t>(values.size()));
  run(context.stream, Download{.y = {host.data(), kDTypeOf<T>, values.shape()}, .x = values});
  return host;
}

std::size_t bucket_of(std::int64_t position) {
  return static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(position + 1))) - 1;
}

}  // namespace

double DivergenceSums::student_perplexity() const {
  return predicted > 0.0 ? std::exp(student_ce / predicted) : 1.0;
}

double DivergenceSums::teacher_perplexity() const {
  return predicted > 0.0 ? std::exp(teacher_ce / predicted) : 1.0;
}

DivergenceSums Divergence::all() const {
  DivergenceSums total;
  for (const DivergenceSums& bucket : by_position) {
    for (const auto field : kFields) {
      total.*field += bucket.*field;
    }
  }
  return total;
}

Evaluator::Evaluator(Context context, Communicator& world, std::int64_t chunk)
    : context_(context), world_(&world), self_(world.split(world.rank())), chunk_(chunk) {
  BIFOCAL_ASSERT(chunk > 0);
}

Row Evaluator::row_of(const EvaluationRows& rows, std::int64_t round, std::int64_t count) const {
  const std::int64_t index = round * world_->size() + world_->rank();
  return index < count ? rows(index) : Row{};
}

void Evaluator::add_row(Decoder& student,
                        Decoder& teacher,
                        const Row& row,
                        const Decoder::Observer& observer,
                        std::vector<DivergenceSums>& sums) {
  RowShard shard = make_row_shard(context_, row, *self_);
  const Tensor student_hidden = student.forward(shard.layout, shard.ids, observer);
  const Tensor teacher_hidden = teacher.forward(shard.layout, shard.ids);
  const Head student_head(context_, student.config(), student.weights());
  const Head teacher_head(context_, teacher.config(), teacher.weights());
  const std::int64_t vocabulary = student.config().vocabulary;
  for (std::int64_t begin = 0; begin < row.tokens(); begin += chunk_) {
    const std::int64_t end = std::min(row.tokens(), begin + chunk_);
    const std::int64_t count = end - begin;
    const auto logits = [&](const Head& head, const Tensor& hidden) {
      Tensor values =
          context_.memory.empty(Region::loss, sum_type(context_.dtype), {count, vocabulary});
      head.logits(hidden.rows(begin, end), values);
      return values;
    };
    const Tensor student_logits = logits(student_head, student_hidden);
    const Tensor teacher_logits = logits(teacher_head, teacher_hidden);
    const Tensor kl_of = per_token(context_, DType::f64, count);
    const Tensor student_ce_of = per_token(context_, DType::f64, count);
    const Tensor teacher_ce_of = per_token(context_, DType::f64, count);
    const Tensor agree_of = per_token(context_, DType::u8, count);
    const ConstTensorView next = shard.next.rows(begin, end);
    run(context_.stream,
        DistillLoss{.kl = kl_of,
                    .ce = student_ce_of,
                    .agree = agree_of,
                    .student = student_logits,
                    .teacher = teacher_logits,
                    .next = next});
    run(context_.stream, DistillLoss{.ce = teacher_ce_of, .student = teacher_logits, .next = next});
    const std::vector<double> kl = to_host<double>(context_, kl_of);
    const std::vector<double> student_ce = to_host<double>(context_, student_ce_of);
    const std::vector<double> teacher_ce = to_host<double>(context_, teacher_ce_of);
    const std::vector<std::uint8_t> agree = to_host<std::uint8_t>(context_, agree_of);
    for (std::int64_t i = 0; i < count; ++i) {
      const auto token = static_cast<std::size_t>(begin + i);
      const auto index = static_cast<std::size_t>(i);
      if (row.keep[token] == 0) {
        continue;
      }
      DivergenceSums& bucket = sums[bucket_of(begin + i - row.start[token])];
      bucket.tokens += 1.0;
      bucket.kl += kl[index];
      bucket.agreements += agree[index];
      if (row.next[token] < 0) {
        continue;
      }
      bucket.predicted += 1.0;
      bucket.student_ce += student_ce[index];
      bucket.teacher_ce += teacher_ce[index];
    }
  }
}

Divergence Evaluator::divergence(Decoder& student,
                                 Decoder& teacher,
                                 const EvaluationRows& rows,
                                 std::int64_t count,
                                 const RowObserver& observe) {
  std::vector<DivergenceSums> sums(kBuckets);
  const std::int64_t rounds = (count + world_->size() - 1) / world_->size();
  for (std::int64_t round = 0; round < rounds; ++round) {
    phase(context_, "validation");
    const Row row = row_of(rows, round, count);
    add_row(student, teacher, row, observe ? observe(row) : Decoder::Observer{}, sums);
  }
  std::vector<double> flat;
  for (const DivergenceSums& bucket : sums) {
    for (const auto field : kFields) {
      flat.push_back(bucket.*field);
    }
  }
  world_->all_reduce_sum({flat.data(), DType::f64, {static_cast<std::int64_t>(flat.size())}});
  auto value = flat.begin();
  for (DivergenceSums& bucket : sums) {
    for (const auto field : kFields) {
      bucket.*field = *value++;
    }
  }
  while (!sums.empty() && sums.back().tokens == 0.0) {
    sums.pop_back();
  }
  return {sums};
}

void Evaluator::add_replacement(Decoder& model,
                                const Row& row,
                                std::int64_t replaced,
                                std::int32_t id,
                                std::vector<ReachPoint>& points) {
  Row changed = row;
  if (row.tokens() > 0) {
    changed.ids[static_cast<std::size_t>(replaced)] = id;
  }
  const auto hidden_of = [&](const Row& which) {
    RowShard shard = make_row_shard(context_, which, *self_);
    return model.forward(shard.layout, shard.ids);
  };
  const Tensor before = hidden_of(row);
  const Tensor after = hidden_of(changed);
  const Head head(context_, model.config(), model.weights());
  const Shape one{1, model.config().vocabulary};
  const DType sums = sum_type(context_.dtype);
  const Tensor logits_before = context_.memory.empty(Region::loss, sums, one);
  const Tensor logits_after = context_.memory.empty(Region::loss, sums, one);
  const Tensor kl = per_token(context_, DType::f64, 1);
  for (std::size_t k = 0; k < points.size(); ++k) {
    const std::int64_t token = replaced + points[k].distance;
    if (token >= row.tokens()) {
      break;
    }
    if (row.start[static_cast<std::size_t>(token)] !=
        row.start[static_cast<std::size_t>(replaced)]) {
      break;
    }
    head.logits(before.rows(token, token + 1), logits_before);
    head.logits(after.rows(token, token + 1), logits_after);
    run(context_.stream, DistillLoss{.kl = kl, .student = logits_after, .teacher = logits_before});
    points[k].mean_kl += to_host<double>(context_, kl).front();
    points[k].samples += 1.0;
  }
}

std::vector<Evaluator::ReachPoint> Evaluator::reach(Decoder& model,
                                                    const EvaluationRows& rows,
                                                    std::int64_t count,
                                                    std::int64_t replacements,
                                                    std::uint64_t seed) {
  std::vector<ReachPoint> points;
  for (std::size_t k = 0; k < kBuckets; ++k) {
    points.push_back({.distance = std::int64_t{1} << k});
  }
  const auto vocabulary = static_cast<std::uint64_t>(model.config().vocabulary);
  const std::uint64_t stream = stream_of("evaluate.reach");
  const std::int64_t rounds = (count + world_->size() - 1) / world_->size();
  for (std::int64_t round = 0; round < rounds; ++round) {
    const Row row = row_of(rows, round, count);
    const std::int64_t content = row.tokens() - row.padding;
    for (std::int64_t n = 0; n < replacements; ++n) {
      const auto draw = static_cast<std::uint64_t>(
          ((round * world_->size() + world_->rank()) * replacements + n) * 2);
      std::int64_t replaced = 0;
      std::int32_t id = 0;
      if (content > 0) {
        replaced = static_cast<std::int64_t>(
            random_below(static_cast<std::uint64_t>(content), seed, stream, draw));
        const std::uint64_t shift = 1 + random_below(vocabulary - 1, seed, stream, draw + 1);
        const auto old = static_cast<std::uint64_t>(row.ids[static_cast<std::size_t>(replaced)]);
        id = static_cast<std::int32_t>((old + shift) % vocabulary);
      }
      add_replacement(model, row, replaced, id, points);
    }
  }
  std::vector<double> flat;
  for (const ReachPoint& point : points) {
    flat.insert(flat.end(), {point.mean_kl, point.samples});
  }
  world_->all_reduce_sum({flat.data(), DType::f64, {static_cast<std::int64_t>(flat.size())}});
  std::vector<ReachPoint> means;
  for (std::size_t k = 0; k < points.size() && flat[2 * k + 1] > 0.0; ++k) {
    means.push_back({points[k].distance, flat[2 * k] / flat[2 * k + 1], flat[2 * k + 1]});
  }
  return means;
}

}  // namespace bifocal
