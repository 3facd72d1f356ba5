// Prefix sums of log decays and the max-plus scan for m, in double.
#include "ops/mlstm_gates.h"

#include <limits>

#include "ops/vector_math.h"

namespace bifocal {

namespace {

constexpr double kEmpty = -std::numeric_limits<double>::infinity();

std::vector<MlstmChunk> cut_chunks(const ConstTensorView& starts) {
  const std::int64_t tokens = starts.shape[0];
  std::vector<MlstmChunk> chunks;
  if (tokens == 0) {
    return chunks;
  }
  const auto* start = starts.as<std::uint8_t>();
  std::int64_t begin = 0;
  for (std::int64_t t = 1; t <= tokens; ++t) {
    if (t == tokens || start[t] != 0 || t - begin == kMlstmChunkTokens) {
      chunks.push_back({begin, t, start[begin] != 0});
      begin = t;
    }
  }
  return chunks;
}

template <class T>
void scan(MlstmProblem& problem, std::int64_t state) {
  const std::int64_t tokens = problem.sizes.tokens;
  const std::int64_t states = problem.sizes.states;
  const T* i_gate = problem.inputs.i_gate.as<T>();
  const T* f_gate = problem.inputs.f_gate.as<T>();
  double* input = problem.gates.input.data() + state * tokens;
  double* decay_sum = problem.gates.decay_sum.data() + state * tokens;
  double* m_out = problem.gates.m.data() + state * tokens;
  double m = problem.gates.initial_m[static_cast<std::size_t>(state)];
  for (const MlstmChunk& chunk : problem.chunks) {
    double sum = 0;
    if (chunk.opens_document) {
      m = kEmpty;
    }
    for (std::int64_t t = chunk.begin; t < chunk.end; ++t) {
      const double log_decay = log_sigmoid(static_cast<double>(f_gate[t * states + state]));
      input[t] = static_cast<double>(i_gate[t * states + state]);
      sum += log_decay;
      decay_sum[t] = sum;
      m = std::max(log_decay + m, input[t]);
      m_out[t] = m;
    }
  }
}

template <class T>
void scan_all(MlstmProblem& problem) {
  const std::int64_t states = problem.sizes.states;
  if (problem.inputs.initial) {
    const T* m = problem.inputs.initial.m.as<T>();
    problem.gates.initial_m.assign(m, m + states);
  }
  if (problem.sizes.tokens == 0) {
    return;
  }
  parallel_ranges(states, 1, 20 * problem.sizes.tokens, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t state = begin; state < end; ++state) {
      scan<T>(problem, state);
    }
  });
}

}  // namespace

double MlstmProblem::m_before(const MlstmChunk& chunk, std::int64_t state) const {
  if (chunk.opens_document) {
    return kEmpty;
  }
  return chunk.begin == 0
             ? gates.initial_m[static_cast<std::size_t>(state)]
             : gates.m[static_cast<std::size_t>(state * sizes.tokens + chunk.begin - 1)];
}

double MlstmProblem::m_after(std::int64_t state) const {
  return sizes.tokens == 0 ? gates.initial_m[static_cast<std::size_t>(state)]
                           : gates.m[static_cast<std::size_t>((state + 1) * sizes.tokens - 1)];
}

MlstmSizes mlstm_sizes(const MlstmInputs& inputs) {
  const std::int64_t states = inputs.k.shape[1];
  return {.tokens = inputs.k.shape[0],
          .heads = inputs.q ? inputs.q.shape[1] : states,
          .states = states,
          .v_heads = inputs.v.shape[1],
          .head_dim = inputs.k.shape[2]};
}

MlstmProblem prepare_mlstm(const MlstmInputs& inputs) {
  MlstmProblem problem{.inputs = inputs,
                       .sizes = mlstm_sizes(inputs),
                       .chunks = cut_chunks(inputs.starts),
                       .gates = {}};
  const auto size = static_cast<std::size_t>(problem.sizes.states * problem.sizes.tokens);
  problem.gates.input.resize(size);
  problem.gates.decay_sum.resize(size);
  problem.gates.m.resize(size);
  problem.gates.initial_m.assign(static_cast<std::size_t>(problem.sizes.states), kEmpty);
  dispatch_real("mlstm", inputs.k.dtype, [&](auto zero) { scan_all<decltype(zero)>(problem); });
  return problem;
}

std::vector<double> mlstm_total_decay(const MlstmInputs& inputs) {
  const MlstmSizes sizes = mlstm_sizes(inputs);
  std::vector<double> total(static_cast<std::size_t>(sizes.states), 0.0);
  if (sizes.tokens == 0) {
    return total;
  }
  const auto* start = inputs.starts.as<std::uint8_t>();
  if (std::any_of(start, start + sizes.tokens, [](std::uint8_t s) { return s != 0; })) {
    total.assign(total.size(), kEmpty);
    return total;
  }
  dispatch_real("mlstm", inputs.f_gate.dtype, [&](auto zero) {
    const auto* f_gate = inputs.f_gate.as<decltype(zero)>();
    for (std::int64_t t = 0; t < sizes.tokens; ++t) {
      for (double& sum : total) {
        sum += log_sigmoid(static_cast<double>(*f_gate++));
      }
    }
  });
  return total;
}

double weight_at_scale(double log_weight, double m) {
  return m == kEmpty ? 0.0 : std::exp(log_weight - m);
}

}  // namespace bifocal
