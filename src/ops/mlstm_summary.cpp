// What crosses ranks: a shard's summary, its gradient's summary, and the folds over neighbours.
#include <limits>

#include "ops/mlstm_reverse.h"
#include "ops/widened.h"

namespace bifocal {

namespace {

// The parts of a packed summary: C, n and two scalars per state.
template <class T>
struct SummaryParts {
  T *c, *n, *m, *decay;

  SummaryParts(T* data, std::int64_t states, std::int64_t dim)
      : c(data), n(c + states * dim * dim), m(n + states * dim), decay(m + states) {}
};

// The parts of a packed gradient summary.
template <class T>
struct GradientParts {
  T *d_c, *d_n, *factor;

  GradientParts(T* data, std::int64_t states, std::int64_t dim)
      : d_c(data), d_n(d_c + states * dim * dim), factor(d_n + states * dim) {}
};

// Only the last document reaches the end of the shard.
std::int64_t last_document_chunk(const MlstmProblem& problem) {
  for (auto chunk = static_cast<std::int64_t>(problem.chunks.size()); chunk > 0; --chunk) {
    if (problem.chunks[static_cast<std::size_t>(chunk - 1)].opens_document) {
      return chunk - 1;
    }
  }
  return 0;
}

// Only the first document, where it began in an earlier shard, reads the incoming state.
std::int64_t chunks_before_first_start(const MlstmProblem& problem) {
  const auto found = std::find_if(problem.chunks.begin(),
                                  problem.chunks.end(),
                                  [](const MlstmChunk& chunk) { return chunk.opens_document; });
  return found - problem.chunks.begin();
}

template <class T>
void summarise(const MlstmSummarise& op) {
  MlstmInputs inputs = op.inputs;
  inputs.q = {};
  inputs.initial = {};
  const MlstmProblem problem = prepare_mlstm(inputs);
  MlstmStates<T> states(problem);
  const std::int64_t skipped = last_document_chunk(problem);
  const auto chunks = static_cast<std::int64_t>(problem.chunks.size());
  for_each_block(chunks - skipped, [&](std::int64_t first, std::int64_t count) {
    states.advance(skipped + first, count);
    states.move_to(count);
  });
  const std::int64_t dim = problem.sizes.head_dim;
  const std::vector<double> decay = mlstm_total_decay(inputs);
  const SummaryParts<T> out(op.summary.as<T>(), problem.sizes.states, dim);
  for (std::int64_t state = 0; state < problem.sizes.states; ++state) {
    const double m = problem.m_after(state);
    store_state(states.at(0, state),
                scale_of_rounded_m<T>(m),
                dim,
                out.c + state * dim * dim,
                out.n + state * dim);
    out.m[state] = static_cast<T>(m);
    out.decay[state] = static_cast<T>(decay[static_cast<std::size_t>(state)]);
  }
}

// m of the state after a shard, rounded as it is stored; every rank finds the same bits.
template <class T>
double outgoing_m(double incoming, double decay, double own) {
  return static_cast<double>(static_cast<T>(std::max(incoming + decay, own)));
}

template <class T>
void fold(const MlstmFold& op) {
  const std::int64_t states = op.state.n.shape[0];
  const std::int64_t dim = op.state.n.shape[1];
  T* c = op.state.c.as<T>();
  T* n = op.state.n.as<T>();
  T* m = op.state.m.as<T>();
  std::fill_n(c, states * dim * dim, T{0});
  std::fill_n(n, states * dim, T{0});
  std::fill_n(m, states, -std::numeric_limits<T>::infinity());
  const auto mix = [](T left, T right, T* x, const T* y, std::int64_t size) {
    for (std::int64_t i = 0; i < size; ++i) {
      x[i] = left * x[i] + right * y[i];
    }
  };
  const std::int64_t size = mlstm_summary_size(states, dim);
  for (std::int64_t shard = 0; shard < op.summaries.shape[0]; ++shard) {
    const SummaryParts<const T> in(op.summaries.as<T>() + shard * size, states, dim);
    for (std::int64_t state = 0; state < states; ++state) {
      const auto own = static_cast<double>(in.m[state]);
      const auto decay = static_cast<double>(in.decay[state]);
      const auto incoming = static_cast<double>(m[state]);
      const auto out = outgoing_m<T>(incoming, decay, own);
      const auto left = static_cast<T>(weight_at_scale(incoming + decay, out));
      const auto right = static_cast<T>(weight_at_scale(own, out));
      mix(left, right, c + state * dim * dim, in.c + state * dim * dim, dim * dim);
      mix(left, right, n + state * dim, in.n + state * dim, dim);
      m[state] = static_cast<T>(out);
    }
  }
}

template <class T>
void gradient_summarise(const MlstmGradientSummarise& op) {
  const MlstmProblem problem = prepare_mlstm(op.inputs);
  const std::int64_t states = problem.sizes.states;
  const std::int64_t dim = problem.sizes.head_dim;
  MlstmReverse<T> reverse(problem, op.h, op.d_h, chunks_before_first_start(problem));
  reverse.run([](std::int64_t /*first*/, std::int64_t /*count*/) {});
  MlstmInputs alone = op.inputs;
  alone.initial = {};
  const MlstmProblem from_empty = prepare_mlstm(alone);
  const std::vector<double> decay = mlstm_total_decay(op.inputs);
  const GradientParts<T> out(op.summary.as<T>(), states, dim);
  for (std::int64_t state = 0; state < states; ++state) {
    store_state(reverse.initial_gradient(state),
                T{1},
                dim,
                out.d_c + state * dim * dim,
                out.d_n + state * dim);
    // From the numbers as MlstmSummarise rounds them, so that scales meet where shards do.
    const auto total = static_cast<double>(static_cast<T>(decay[static_cast<std::size_t>(state)]));
    const auto own = static_cast<double>(static_cast<T>(from_empty.m_after(state)));
    const double incoming = problem.gates.initial_m[static_cast<std::size_t>(state)];
    out.factor[state] =
        static_cast<T>(weight_at_scale(incoming + total, outgoing_m<T>(incoming, total, own)));
  }
}

template <class T>
void gradient_fold(const MlstmGradientFold& op) {
  const std::int64_t states = op.d_n.shape[0];
  const std::int64_t dim = op.d_n.shape[1];
  T* d_c = op.d_c.as<T>();
  T* d_n = op.d_n.as<T>();
  std::fill_n(d_c, states * dim * dim, T{0});
  std::fill_n(d_n, states * dim, T{0});
  const auto pass = [](T factor, T* d, const T* local, std::int64_t size) {
    for (std::int64_t i = 0; i < size; ++i) {
      d[i] = local[i] + factor * d[i];
    }
  };
  const std::int64_t size = mlstm_gradient_summary_size(states, dim);
  for (std::int64_t shard = op.summaries.shape[0] - 1; shard >= 0; --shard) {
    const GradientParts<const T> in(op.summaries.as<T>() + shard * size, states, dim);
    for (std::int64_t state = 0; state < states; ++state) {
      pass(in.factor[state], d_c + state * dim * dim, in.d_c + state * dim * dim, dim * dim);
      pass(in.factor[state], d_n + state * dim, in.d_n + state * dim, dim);
    }
  }
}

}  // namespace

void run(CpuStream& stream, const MlstmSummarise& op) {
  if (run_widened(stream, op, [](auto& o) {
        return std::tuple_cat(std::tie(o.summary), kMlstmTensors(o.inputs));
      })) {
    return;
  }
  dispatch_real(
      "mlstm summary", op.summary.dtype, [&](auto zero) { summarise<decltype(zero)>(op); });
}

void run(CpuStream& /*stream*/, const MlstmFold& op) {
  dispatch_real("mlstm fold", op.state.c.dtype, [&](auto zero) { fold<decltype(zero)>(op); });
}

void run(CpuStream& stream, const MlstmGradientSummarise& op) {
  if (run_widened(stream, op, [](auto& o) {
        return std::tuple_cat(std::tie(o.summary, o.d_h, o.h), kMlstmTensors(o.inputs));
      })) {
    return;
  }
  dispatch_real("mlstm gradient summary", op.summary.dtype, [&](auto zero) {
    gradient_summarise<decltype(zero)>(op);
  });
}

void run(CpuStream& /*stream*/, const MlstmGradientFold& op) {
  dispatch_real(
      "mlstm gradient fold", op.d_c.dtype, [&](auto zero) { gradient_fold<decltype(zero)>(op); });
}

}  // namespace bifocal
