// Far branches seen from outside: gates and heads are read where a layer hands them out.
#include "evaluate/validation.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/bifocal_gate.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "ops/transfer.h"

namespace bifocal {

namespace {

constexpr std::int64_t kPiece = 2048;  // tokens whose far heads exist at once

// A tensor's elements on the host, which alone has double precision beside every type.
std::vector<double> to_host(Context& context, const ConstTensorView& x) {
  CpuStream cpu;
  Memory host;
  const Tensor narrow = host.empty(Region::loss, x.dtype, x.shape);
  run(context.stream, Download{.y = narrow, .x = x});
  std::vector<double> values(static_cast<std::size_t>(x.size()));
  run(cpu, Cast{.y = {values.data(), DType::f64, x.shape}, .x = narrow});
  return values;
}

double sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

}  // namespace

BranchObserver::BranchObserver(Context context, const ModelConfig& config)
    : context_(context), mixers_(config.mixers), layers_(config.mixers.size()) {}

Decoder::Observer BranchObserver::observe(std::int64_t tokens) {
  return [this, tokens](std::int64_t layer, const Block::Observation& seen) {
    const auto index = static_cast<std::size_t>(layer);
    const MixerSettings& mixer = mixers_[index];
    if (tokens > 0 && mixer.has_near() && mixer.has_far()) {
      add(layers_[index], seen, tokens);
    }
  };
}

double BranchObserver::squares(const ConstTensorView& x) {
  const Tensor sum = context_.memory.zeros(Region::loss, DType::f64, {1});
  run(context_.stream, SumOfSquares{.sum = sum, .x = x});
  double value = 0.0;
  run(context_.stream, Download{.y = {&value, DType::f64, {1}}, .x = sum});
  return value;
}

void BranchObserver::add(Layer& layer, const Block::Observation& seen, std::int64_t tokens) {
  layer.mixed += squares(seen.heads.rows(0, tokens));
  if (!seen.gate) {
    layer.far += squares(seen.far.rows(0, tokens));
    return;
  }
  const std::vector<double> gates = to_host(context_, seen.gate.rows(0, tokens));
  for (const double gate : gates) {
    layer.gate += sigmoid(gate);
  }
  layer.gates += static_cast<double>(gates.size());
  // o far is what the mixed heads are where the near branch is zero.
  for (std::int64_t begin = 0; begin < tokens; begin += kPiece) {
    const std::int64_t end = std::min(tokens, begin + kPiece);
    const ConstTensorView far = seen.far.rows(begin, end);
    const Tensor zero = context_.memory.zeros(Region::loss, far.dtype, far.shape);
    const Tensor gated = context_.memory.empty(Region::loss, far.dtype, far.shape);
    run(context_.stream,
        BifocalGateForward{
            .y = gated, .far = far, .near = zero, .gate = seen.gate.rows(begin, end)});
    layer.far += squares(gated);
  }
}

BranchShares BranchObserver::shares(Communicator& group) {
  std::vector<double> flat;
  for (const Layer& layer : layers_) {
    flat.insert(flat.end(), {layer.gate, layer.gates, layer.far, layer.mixed});
  }
  group.all_reduce_sum({flat.data(), DType::f64, {static_cast<std::int64_t>(flat.size())}});
  if (std::ranges::none_of(mixers_, [](const MixerSettings& m) { return m.has_far(); })) {
    return {};
  }
  const auto ratio = [](double part, double whole) {
    return whole > 0.0 ? part / whole : std::numeric_limits<double>::quiet_NaN();
  };
  BranchShares shares;
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    const double* sums = flat.data() + 4 * layer;
    shares.gate_means.push_back(ratio(sums[0], sums[1]));
    shares.far_shares.push_back(std::sqrt(ratio(sums[2], sums[3])));
  }
  return shares;
}

Validation validate(Context context,
                    Evaluator& evaluator,
                    Communicator& world,
                    Decoder& student,
                    Decoder& teacher,
                    const EvaluationRows& rows,
                    std::int64_t count) {
  BranchObserver branches(context, student.config());
  Validation found{.rows = count};
  found.divergence =
      evaluator.divergence(student, teacher, rows, count, [&branches](const Row& row) {
        return branches.observe(row.tokens() - row.padding);
      });
  found.branches = branches.shares(world);
  return found;
}

}  // namespace bifocal
